"""The twins: one recurrence, written once for the CPU and once for CUDA.

The rule of the twins. ``cpu.py`` and ``cuda.py`` have the same host functions with the same
arguments in the same order; both call the scalar arithmetic of ``recurrence.py``; both walk the
same five stages, named in comments: load -> score -> absorb -> accumulate -> store. They share
words and arithmetic, not loops, and never import each other.
"""
