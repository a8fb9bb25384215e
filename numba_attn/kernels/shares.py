"""A lane's share of rows: tuples of float32 in registers, and what is done with them.

A row lies in pieces of a few neighbouring numbers, dealt to the lanes that hold it: lane i has the
pieces i, i + lanes, ... A share is a tuple, never an array, so that it is in registers whatever the
compiler does; these functions are straight-line code, in one order, and their simulator versions
are the same sums in Python.
"""

from . import warp

if warp.SIMULATOR:  # two versions of the same names
    from ._simulated_shares import *  # noqa: F403
else:
    from ._compiled_shares import *  # noqa: F403
