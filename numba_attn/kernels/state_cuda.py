"""What the CUDA twin does with states: merge partial ones, finalize, reset.

A state is one run of float32: m of all rows and heads, then l, then o.
"""

import functools

import numpy as np

from . import recurrence, rows_cuda, shares, warp
from ._jit import cuda_function, cuda_kernel
from .warp import WARP, cuda

MERGE_THREADS = 128
NONE = np.float32(-1)  # no factor, which is a weight: at least 0, or NaN


@cuda_function
def fold(m, l, o, at, m2, l2, o2, dim, thread, threads):
    """Merge (m2, l2, o2) into (m, l, o[at:]): write o, return the new m and l."""
    if recurrence.is_empty(m2, l2):
        return m, l
    if recurrence.is_empty(m, l):
        for d in range(thread, dim, threads):
            o[at + d] = o2[d]
        return m2, l2
    m_new = recurrence.larger(m, m2)
    a, b = recurrence.weight(m, m_new), recurrence.weight(m2, m_new)
    for d in range(thread, dim, threads):
        o[at + d] = warp.blend(o[at + d], a, o2[d], b)
    return m_new, warp.blend(l, a, l2, b)


largest_of_warp = shares.lanes_max(WARP)


@cuda_function
def _first(is_one, lane):
    """Return the first lane of the warp that is one of some, or the number of lanes."""
    rank = largest_of_warp(np.float32(WARP - lane) if is_one else recurrence.ZERO)
    return WARP - np.int64(rank)


@cuda_function
def _factors(m, seen, part_m, empty, first, lane):
    """Return the factors of `shares.left_fold` for a lane's partial, and m after it.

    Before the first of all partials the running maximum is m, and `seen` tells whether anything
    is in it; `first` of them is not empty. Where nothing has been seen, a partial is copied.
    """
    before = part_m[first] if first < lane and not seen else m
    for i in range(WARP):
        if i < lane:
            before = recurrence.larger(before, part_m[i])
    if empty:
        return recurrence.ONE, NONE, before
    if not seen and first >= lane:
        return NONE, recurrence.ONE, part_m[lane]
    after = recurrence.larger(before, part_m[lane])
    return recurrence.weight(before, after), recurrence.weight(part_m[lane], after), after


@cuda_kernel
def merge_splits(parts, num_parts, starts, state, num_rows, num_heads, dim):
    """Left fold: state = merge(state, partial), partial by partial.

    A block for each row and head. A warp's number of partials at a time, a lane finds the factors
    of each, while what they are the factors of is loaded; then each thread folds its column.
    """
    part_m = cuda.shared.array(WARP, np.float32)
    part_l = cuda.shared.array(WARP, np.float32)
    a = cuda.shared.array(WARP, np.float32)
    b = cuda.shared.array(WARP, np.float32)
    reached = cuda.shared.array(2, np.float32)  # m, and whether anything has been seen
    thread, pair = cuda.threadIdx.x, cuda.blockIdx.x
    row = warp.divide(pair, num_heads)
    head = pair - row * num_heads
    pairs, part_pairs = num_rows * num_heads, num_parts * num_heads
    begin, end = starts[row], starts[row + 1]
    if begin == end:
        return
    for column in range(thread, dim + thread, MERGE_THREADS):
        d = min(column, dim - 1)
        at = 2 * pairs + pair * dim + d
        o, m, l = state[at], state[pair], state[pairs + pair]
        seen = not recurrence.is_empty(m, l)
        for start in range(begin, end, WARP):
            count, part = min(WARP, end - start), start * num_heads + head
            o2 = shares.gather(parts, 2 * part_pairs + part * dim + d, num_heads * dim, count)
            empty, first = True, WARP
            if thread < WARP:
                m2, l2 = recurrence.NEG_INF, recurrence.ZERO
                if thread < count:
                    m2 = parts[part + thread * num_heads]
                    l2 = parts[part_pairs + part + thread * num_heads]
                # A shuffle orders no memory, but would seem to in the simulator: part_l is written
                # before it and part_m after it, so that there both barriers around are missed.
                part_l[thread], empty = l2, recurrence.is_empty(m2, l2)
                first = _first(not empty, thread)
                part_m[thread] = m2
            cuda.syncthreads()
            if thread < WARP:
                a[thread], b[thread], m = _factors(m, seen, part_m, empty, first, thread)
                if thread == WARP - 1:
                    reached[0] = m
                    reached[1] = recurrence.ONE if seen or first < WARP else recurrence.ZERO
            cuda.syncthreads()
            m, seen = reached[0], reached[1] == recurrence.ONE
            o = shares.left_fold(o, o2, a, b)
            l = shares.left_fold(l, shares.gather(part_l, 0, 1, WARP), a, b)
            cuda.syncthreads()  # every thread has read part_l, and this column's m and l
        if column < dim:
            state[at] = o
    if thread == 0:
        state[pair], state[pairs + pair] = m, l


@functools.cache
def finalize(dtype, with_lse):
    """Compile the kernel that normalises into a number format."""
    narrow = warp.narrow(dtype)

    @cuda_kernel
    def finalize_rows(state, shape, out, where, queries, sinks, lse):
        num_rows, num_heads, dim = shape
        pair, pairs = cuda.blockIdx.x, num_rows * num_heads
        row = warp.divide(pair, num_heads)
        head = pair - row * num_heads
        to = rows_cuda.offset(where, row, queries, head)
        sink = warp.load_float32(sinks[0] + head * sinks[1], recurrence.NEG_INF)
        m, l, factor = recurrence.with_sink(state[pair], state[pairs + pair], sink)
        for d in range(cuda.threadIdx.x, dim, WARP):
            o = state[2 * pairs + pair * dim + d]
            out[to + d] = narrow(recurrence.normalise(o * factor, l))
        if with_lse and cuda.threadIdx.x == 0:
            lse[pair] = recurrence.log_sum_exp(m, l)

    return finalize_rows


@cuda_kernel
def reset(state, pairs):
    """Return a state to the identity."""
    i = cuda.blockIdx.x * MERGE_THREADS + cuda.threadIdx.x
    if i < state.size:
        state[i] = recurrence.NEG_INF if i < pairs else recurrence.ZERO
