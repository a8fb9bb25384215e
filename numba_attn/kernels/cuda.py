"""The CUDA twin: one block of threads per sequence and query head.

A block walks its row in splits, and each split in tiles of 16 tokens that it stages in shared
memory. A warp scores a token; thread t owns the columns t, t + T, ... of o. Every split starts from
the identity and is folded into the state in order, inside the block. Grids depend on shapes only.
"""

import functools
import threading
import warnings

import numpy as np
from numba import cuda

from .. import _arrays, _plan
from . import recurrence, warp
from ._jit import cuda_function, cuda_kernel
from .warp import WARP

TILE = _plan.GROUP_TOKENS
SPLIT = _plan.CUDA_SPLIT_TOKENS

RESIDENT_THREADS = 512  # of a multiprocessor, at least: leaves 128 registers to each

_launching = threading.Lock()


def step_tile(state, q, k_pool, v_pool, tables, token_counts, scale):
    """Absorb a tile: every split of a row, folded into its state.

    Parameters
    ----------
    state : AttentionState
        float32 m [S, Hq], l [S, Hq], o [S, Hq, Dv]; modified.
    q : uint16 [S, Hq, D]
    k_pool, v_pool : uint16 [N, B, Hkv, D], [N, B, Hkv, Dv]
    tables : int32 [S, T]
    token_counts : int32 [S]
    scale : float32
    """
    if 0 in (q.size, k_pool.size, v_pool.size, tables.size):
        return  # no sequence, or none can have a token
    arrays = [_arrays.flatten(array) for array in (q, k_pool, v_pool, tables, token_counts)]
    block_size, num_kv_heads = k_pool.shape[1:3]
    variant = _plan.step_variant(
        (_arrays.address(k_pool), _arrays.address(v_pool)),
        (arrays[1].strides[:3], arrays[2].strides[:3]),
        (q.shape[2], v_pool.shape[3]),
    )
    where = tuple((array.offset, *array.strides) for array in arrays)
    sizes = (q.shape[1], q.shape[1] // num_kv_heads, block_size)
    memory = [array.memory for array in arrays]
    args = (*memory, where, sizes, scale, state.m, state.l, state.o)
    launch(_step_kernel(variant), state.m.size, variant.threads, *args)


def merge_splits(state, partials, starts):
    """Fold partial states into `state`, in order: a strict left fold.

    Parameters
    ----------
    state : float32 m [S, Hq], l [S, Hq], o [S, Hq, Dv]; modified.
    partials : float32 m [n, Hq], l [n, Hq], o [n, Hq, Dv]
    starts : int32 [S + 1]
        The partials of sequence s are starts[s] to starts[s + 1].
    """
    if partials.o.size and state.o.size:
        args = (partials.m, partials.l, partials.o, starts, state.m, state.l, state.o)
        _launch_rows(_merge_splits, state, *args)


def finalize(state, out, lse):
    """Write o / l as bfloat16 bits [S, Hq, Dv] and the log-sum-exp [S, Hq]."""
    if state.o.size:
        bits = _arrays.flatten(out)
        args = (state.m, state.l, state.o, bits.memory, (bits.offset, *bits.strides), lse)
        _launch_rows(_finalize, state, *args)


def reset(state):
    """Return a state to the identity."""
    if state.o.size:
        _launch_rows(_reset, state, state.m, state.l, state.o)


def times(counts, factor):
    """Return counts [S] * factor as int32."""
    products = cuda.device_array(counts.shape, np.int32)
    if counts.size:
        flat = _arrays.flatten(counts)
        where = (flat.offset, *flat.strides)
        launch(
            _times, _plan.ceil_div(counts.size, WARP), WARP, flat.memory, where, factor, products
        )
    return products


def _launch_rows(kernel, state, *args):
    """Launch one warp for every row of a state."""
    launch(kernel, state.m.size, WARP, *args)


def launch(kernel, blocks, threads, *args):
    """Launch a kernel; a small grid is no mistake of the user's."""
    with _launching, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Grid size .* low occupancy", Warning)
        configured = kernel[blocks, threads]
        if warp.SIMULATOR:  # one kernel at a time, and NumPy scalars warn of NaN and inf
            warnings.simplefilter("ignore", RuntimeWarning)
            return configured(*args)
    return configured(*args)


@functools.cache
def _step_kernel(variant):
    """Compile the step kernel for one `_plan.StepVariant`."""
    head_dim, v_head_dim, wide = variant
    threads = variant.threads
    warps = threads // WARP
    width, copy = (8, warp.copy_16_bytes) if wide else (1, warp.copy_2_bytes)
    k_size, v_size = TILE * head_dim, TILE * v_head_dim
    k_chunks, v_chunks = head_dim // width, v_head_dim // width
    # Loops of constant length, with a guard: they are unrolled, and their offsets are constants.
    tokens_per_warp = _plan.ceil_div(TILE, warps)
    columns_per_lane = _plan.ceil_div(head_dim, WARP)
    columns_per_thread = _plan.ceil_div(v_head_dim, threads)

    @cuda_function
    def stage(tile, dim, chunks, pool, rows, first, count, thread):
        """Copy rows first..first + count of a split to shared memory."""
        for i in range(thread, count * chunks, threads):
            t = warp.divide(i, chunks)
            d = (i - t * chunks) * width
            copy(tile, t * dim + d, pool, rows[first + t] + d)

    @cuda_function
    def dot(query, k_tile, t, lane):
        """Return a lane's part of q . k for one token."""
        s = recurrence.ZERO
        for part in range(columns_per_lane):
            d = lane + part * WARP
            if d < head_dim:
                s += query[d] * warp.load_bfloat16(k_tile, t * head_dim + d)
        return s

    @cuda_function
    def add_values(x, weights, v_tile, d, count):
        """Return x + p . v for one column."""
        for t in range(TILE):
            if t < count:
                x += weights[t] * warp.load_bfloat16(v_tile, t * v_head_dim + d)
        return x

    def step(q, k_pool, v_pool, tables, token_counts, where, sizes, scale, m, l, o):
        query = cuda.shared.array(head_dim, np.float32)
        k_rows = cuda.shared.array(SPLIT, np.int64)
        v_rows = cuda.shared.array(SPLIT, np.int64)
        k_tile = cuda.shared.array(k_size, np.uint16, alignment=16)
        v_tile = cuda.shared.array(v_size, np.uint16, alignment=16)
        scores = cuda.shared.array(TILE, np.float32)
        weights = cuda.shared.array(TILE, np.float32)
        o_split = cuda.shared.array(v_head_dim, np.float32)
        q_at, k_at, v_at, table_at, count_at = where
        num_q_heads, gqa, block_size = sizes
        thread = cuda.threadIdx.x
        lane, own_warp = thread & (WARP - 1), thread // WARP
        seq, head = _row_of_block(num_q_heads)
        kv = warp.divide(head, gqa)
        table = table_at[0] + seq * table_at[1]
        tokens = np.int64(token_counts[count_at[0] + seq * count_at[1]])
        if tokens <= 0:
            return
        for d in range(thread, head_dim, threads):
            query[d] = warp.load_bfloat16(q, q_at[0] + seq * q_at[1] + head * q_at[2] + d)
        m_row, l_row, o_row = m[seq, head], l[seq, head], o[seq, head]
        for begin in range(0, tokens, SPLIT):
            split = min(SPLIT, tokens - begin)
            for t in range(thread, split, threads):
                column = warp.divide(begin + t, block_size)
                slot = begin + t - column * block_size
                block = np.int64(tables[table + column * table_at[2]])
                k_rows[t] = k_at[0] + block * k_at[1] + slot * k_at[2] + kv * k_at[3]
                v_rows[t] = v_at[0] + block * v_at[1] + slot * v_at[2] + kv * v_at[3]
            m2, l2 = recurrence.NEG_INF, recurrence.ZERO
            for d in range(thread, v_head_dim, threads):
                o_split[d] = recurrence.ZERO
            cuda.syncthreads()
            for first in range(0, split, TILE):
                count = min(TILE, split - first)
                # load
                stage(k_tile, head_dim, k_chunks, k_pool, k_rows, first, count, thread)
                stage(v_tile, v_head_dim, v_chunks, v_pool, v_rows, first, count, thread)
                cuda.syncthreads()
                # score
                for turn in range(tokens_per_warp):
                    t = own_warp + turn * warps
                    if t < count:
                        s = warp.warp_sum(dot(query, k_tile, t, lane))
                        if lane == 0:
                            scores[t] = s * scale
                cuda.syncthreads()
                # absorb
                m_new = _largest(m2, scores, count)
                if thread < count:
                    weights[thread] = recurrence.weight(scores[thread], m_new)
                cuda.syncthreads()
                rescale = recurrence.weight(m2, m_new)
                m2, l2 = m_new, _total(l2 * rescale, weights, count)
                # accumulate
                for turn in range(columns_per_thread):
                    d = thread + turn * threads
                    if d < v_head_dim:
                        o_split[d] = add_values(o_split[d] * rescale, weights, v_tile, d, count)
                cuda.syncthreads()
            # store
            m_row, l_row = _fold(m_row, l_row, o_row, m2, l2, o_split, thread, threads)
        if thread == 0:
            m[seq, head], l[seq, head] = m_row, l_row

    return cuda_kernel(step, (threads, RESIDENT_THREADS // threads))


@cuda_function
def _row_of_block(num_q_heads):
    """Return the sequence and the query head of this block; heads come first."""
    seq = warp.divide(cuda.blockIdx.x, num_q_heads)
    return seq, cuda.blockIdx.x - seq * num_q_heads


@cuda_function
def _largest(m, scores, count):
    for t in range(TILE):
        if t < count:
            m = recurrence.larger(m, scores[t])
    return m


@cuda_function
def _total(l, weights, count):
    for t in range(TILE):
        if t < count:
            l += weights[t]
    return l


@cuda_function
def _fold(m, l, o, m2, l2, o2, thread, threads):
    """Merge (m2, l2, o2) into (m, l, o): write a thread's columns of o, return the new m and l."""
    if recurrence.is_empty(m2, l2):
        return m, l
    if recurrence.is_empty(m, l):
        for d in range(thread, len(o), threads):
            o[d] = o2[d]
        return m2, l2
    m_new = recurrence.larger(m, m2)
    a, b = recurrence.weight(m, m_new), recurrence.weight(m2, m_new)
    for d in range(thread, len(o), threads):
        o[d] = o[d] * a + o2[d] * b
    return m_new, l * a + l2 * b


@cuda_kernel
def _merge_splits(part_m, part_l, part_o, starts, m, l, o):
    """Left fold: state = merge(state, partial), partial by partial."""
    seq, head = _row_of_block(m.shape[1])
    m_row, l_row, o_row = m[seq, head], l[seq, head], o[seq, head]
    for part in range(starts[seq], starts[seq + 1]):
        m2, l2, o2 = part_m[part, head], part_l[part, head], part_o[part, head]
        m_row, l_row = _fold(m_row, l_row, o_row, m2, l2, o2, cuda.threadIdx.x, WARP)
    cuda.syncthreads()  # every thread has read m and l
    if cuda.threadIdx.x == 0:
        m[seq, head], l[seq, head] = m_row, l_row


@cuda_kernel
def _finalize(m, l, o, out, where, lse):
    seq, head = _row_of_block(m.shape[1])
    for d in range(cuda.threadIdx.x, o.shape[2], WARP):
        x = recurrence.normalise(o[seq, head, d], l[seq, head])
        bits = recurrence.round_to_bfloat16(warp.float_bits(x))
        out[where[0] + seq * where[1] + head * where[2] + d] = bits
    if cuda.threadIdx.x == 0:
        lse[seq, head] = recurrence.log_sum_exp(m[seq, head], l[seq, head])


@cuda_kernel
def _reset(m, l, o):
    seq, head = _row_of_block(m.shape[1])
    for d in range(cuda.threadIdx.x, o.shape[2], WARP):
        o[seq, head, d] = recurrence.ZERO
    if cuda.threadIdx.x == 0:
        m[seq, head], l[seq, head] = recurrence.NEG_INF, recurrence.ZERO


@cuda_kernel
def _times(counts, where, factor, products):
    i = cuda.blockIdx.x * WARP + cuda.threadIdx.x
    if i < products.size:
        products[i] = counts[where[0] + i * where[1]] * factor
