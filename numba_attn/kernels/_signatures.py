"""The kernels of a decode step by name, with the signatures for which `_ptx` compiles them."""

import numba
import numpy as np
from numba.cuda import types

from .. import _arrays
from . import cuda, rows_cuda, state_cuda, step_cuda

_PLACE = (0, 0)  # an address and a stride
_WHERE = rows_cuda.Places(*((0,) * n for n in (4, 5, 5, 3, 4, 4, 2)))
_LISTS, _SIZES = rows_cuda.Lists(*(_PLACE,) * 5), rows_cuda.Sizes(*(0,) * 8)
_FACTORS = (np.float32(0),) * 2


def _array(dtype):
    return types.Array(numba.from_dtype(np.dtype(dtype)), 1, "C")


def step(name, variant):
    """Return the kernel `simple` or `split`, and its signature."""
    where, lists, sizes, factors = map(numba.typeof, (_WHERE, _LISTS, _SIZES, _FACTORS))
    arrays = [_array(_arrays.CARRIERS[one]) for one in variant.formats]
    pools = (*arrays, _array("i4"), where)
    if name == "simple":
        return step_cuda.simple(variant), (*pools, lists, sizes, factors, _array("f4"))
    jobs = numba.typeof(step_cuda.Jobs(0, 0, 0))
    rest = (sizes, factors, _array("i4"), jobs, _array("f4"))
    return step_cuda.split(variant), (*pools, *rest)


def others():
    """Return the other kernels and their signatures, by name."""
    lists, sizes, place = map(numba.typeof, (_LISTS, _SIZES, _PLACE))
    where, shape = map(numba.typeof, ((0,) * 4, (0,) * 3))
    state, integers, size = _array("f4"), _array("i4"), types.int64
    found = {
        "list_items": (step_cuda.list_items, (lists, sizes, size, size, integers)),
        "merge_splits": (
            state_cuda.merge_splits,
            (state, size, integers, state, size, size, size),
        ),
        "reset": (state_cuda.reset, (state, size)),
        "times": (cuda._times, (integers, place, size, integers)),
    }
    for name in _arrays.QUERY_FORMATS:
        signature = (state, shape, _array(_arrays.CARRIERS[name]), where, size, place, state)
        for with_lse in (False, True):
            kernel = state_cuda.finalize(name, with_lse)
            found[f"finalize-{name}" + "-lse" * with_lse] = kernel, signature
    return found
