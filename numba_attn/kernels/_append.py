"""What both twins of append_kv are compiled for, as plain numbers."""

import functools
from typing import NamedTuple

from .. import _arrays

FORMATS = tuple(_arrays.CARRIERS)
MOST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "int8": 127.0}
"""The largest numbers of the formats of 8 bits."""

CONVERT, COPY, GIVEN, COMPUTED = range(4)


class Plan(NamedTuple):
    """What a kernel is compiled for."""

    source: int  # format of the tokens: its place in FORMATS
    target: int  # format of the pool
    mode: int  # CONVERT, COPY the bits, or divide by a scale: GIVEN or COMPUTED
    itemsize: int  # bytes of a number in the pool
    most: float  # the largest number of the pool's format


@functools.cache
def plan(formats, scaled, computed):
    """Choose the kernel that writes tokens of formats[0] into a pool of formats[1].

    Examples
    --------
    >>> plan(("float32", "int8"), False, False)
    Plan(source=2, target=5, mode=0, itemsize=1, most=127.0)
    """
    source, target = formats
    if scaled:
        mode = COMPUTED if computed else GIVEN
    else:
        mode = COPY if source == target else CONVERT
    numbers = (FORMATS.index(name) for name in formats)
    return Plan(*numbers, mode, _arrays.CARRIERS[target].itemsize, MOST.get(target, 0.0))
