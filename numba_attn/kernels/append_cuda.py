"""Write new tokens into a pool, on CUDA: a warp for the row of each token and kv head."""

import functools

import numpy as np
from numba import cuda

from .. import _arrays
from . import _append, recurrence, warp
from ._append import COMPUTED, CONVERT, COPY, FORMATS, GIVEN
from ._jit import cuda_function, cuda_kernel
from .cuda import launch
from .warp import WARP


def append(tokens, pool, slots, formats, scale, computed):
    """Write the rows of tokens into their slots of a pool.

    Parameters
    ----------
    tokens : [T, Hkv, D], bits of formats[0]
    pool : [N, B, Hkv, D], bits of formats[1]; modified.
    slots : int32 or int64 [T]
        Of a token: block * B + place in the block; outside the pool: the token is skipped.
    formats : (str, str)
    scale : float32 [Hkv], [N, B, Hkv] or None
        What the numbers are divided by.
    computed : bool
        The scale, [N, B, Hkv], is computed from each row; modified.
    """
    if 0 in (tokens.size, pool.size):
        return
    num_tokens, num_heads, dim = tokens.shape
    sizes = (num_heads, dim, pool.shape[1], pool.shape[0] * pool.shape[1])
    plan = _append.plan(formats, scale is not None, computed)
    # A kernel without scales reads none: any array stands in for them.
    arrays = [_arrays.flatten(x) for x in (tokens, pool, slots, slots if scale is None else scale)]
    tokens_at, pool_at, slots_at, scale_at = ((array.offset, *array.strides) for array in arrays)
    scale_at = (scale_at[0], *(0,) * (4 - len(scale_at)), *scale_at[1:])
    where = (tokens_at, pool_at, slots_at, scale_at)
    memory = [array.memory for array in arrays]
    launch(_append_rows(plan), num_tokens * num_heads, WARP, *memory, where, sizes)


@functools.cache
def _append_rows(plan):
    """Return the kernel for one `_append.Plan`."""
    source, target, mode, _, most = plan
    load, narrow = warp.LOADERS[FORMATS[source]], warp.narrow(FORMATS[target])

    @cuda_function
    def largest_of(tokens, row, dim, lane, parts):
        """Return the largest magnitude of a row, NaN aside, the same in every lane."""
        largest = recurrence.ZERO
        for d in range(lane, dim, WARP):
            largest = recurrence.larger(largest, abs(load(tokens, row + d)))
        parts[lane] = largest
        cuda.syncthreads()
        for i in range(WARP):
            largest = recurrence.larger(largest, parts[i])
        return largest

    def append_rows(tokens, pool, slots, scales, where, sizes):
        parts = cuda.shared.array(WARP, np.float32)
        tokens_at, pool_at, slots_at, scale_at = where
        num_heads, dim, block_size, num_slots = sizes
        lane = cuda.threadIdx.x
        token = warp.divide(cuda.blockIdx.x, num_heads)
        head = cuda.blockIdx.x - token * num_heads
        slot = np.int64(slots[slots_at[0] + token * slots_at[1]])
        if slot < 0 or slot >= num_slots:
            return
        block = slot // block_size
        slot -= block * block_size
        row = tokens_at[0] + token * tokens_at[1] + head * tokens_at[2]
        out = pool_at[0] + block * pool_at[1] + slot * pool_at[2] + head * pool_at[3]
        here = scale_at[0] + block * scale_at[1] + slot * scale_at[2] + head * scale_at[3]
        scale = recurrence.ONE
        if mode == GIVEN:
            scale = np.float32(scales[here])
        elif mode == COMPUTED:
            scale = recurrence.token_scale(largest_of(tokens, row, dim, lane, parts), most)
            if lane == 0:
                scales[here] = scale
        for d in range(lane, dim, WARP):
            if mode == COPY:
                pool[out + d] = tokens[row + d]
            elif mode == CONVERT:
                pool[out + d] = narrow(load(tokens, row + d))
            else:
                pool[out + d] = narrow(recurrence.scaled_down(load(tokens, row + d), scale))

    return cuda_kernel(append_rows)
