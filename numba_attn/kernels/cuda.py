"""The CUDA twin: one block of threads per query token and query head.

A block walks the keys of its row in splits, and each split in tiles of 16 tokens that it stages in
shared memory. A warp scores a token; thread t owns the columns t, t + T, ... of o. Every split
starts from the identity and is folded into the state in order, inside the block. Grids depend on
shapes only.
"""

import functools
import threading
import warnings

import numpy as np
from numba import cuda

from .. import _arrays, _plan, _plan_cuda
from . import recurrence, rows_cuda, warp
from ._jit import cuda_function, cuda_kernel
from .warp import WARP

TILE = _plan.GROUP_TOKENS
SPLIT = _plan_cuda.SPLIT_TOKENS

RESIDENT_THREADS = 512  # of a multiprocessor, at least: leaves 128 registers to each

_launching = threading.Lock()


def step_tile(state, q, k_pool, v_pool, formats, tile, options):
    """Absorb a tile: every split of a row, folded into its state.

    Parameters
    ----------
    state : AttentionState
        float32 m [rows, Hq], l [rows, Hq], o [rows, Hq, Dv]; modified.
    q : [rows, Hq, D] or [S, Q, Hq, D]
    k_pool, v_pool : [N, B, Hkv, D], [N, B, Hkv, Dv]
    formats : Formats
        Of q and the pools.
    tile : Tile
        The keys, int32 on the device.
    options : Options
    """
    if 0 in (q.size, k_pool.size, v_pool.size, tile.tables.size):
        return  # no row, or none can have a token
    arrays = [_arrays.flatten(array) for array in (q, k_pool, v_pool, tile.tables)]
    rows = (
        rows_cuda.of_pool(x, flat) for x, flat in zip((k_pool, v_pool), arrays[1:3], strict=True)
    )
    variant = _plan_cuda.step_variant(*rows, formats, options)
    memory = [array.memory for array in arrays]
    query_place, *places = ((array.offset, *array.strides) for array in arrays)
    scales = (rows_cuda.locate(x, 3) for x in (options.k_scale, options.v_scale))
    where = rows_cuda.Places(
        rows_cuda.by_query(query_place), *places, *scales, rows_cuda.locate(options.alibi_slopes, 1)
    )
    lists = rows_cuda.Lists(*(rows_cuda.locate(x, 1) for x in tile[1:6]))
    num_q_heads = state.m.shape[1]
    sizes = rows_cuda.Sizes(
        num_q_heads,
        num_q_heads // k_pool.shape[2],
        k_pool.shape[1],
        tile.tables.shape[0],
        q.shape[1] if len(q.shape) == 4 else 1,
        options.sliding_window,
        int(options.causal),
    )
    factors = np.float32(options.scale), np.float32(options.softcap)
    args = (*memory, where, lists, sizes, factors, state.m, state.l, state.o)
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


def finalize(state, sinks, out, lse, dtype):
    """Write o / l as `dtype` [rows, Hq, Dv] and the log-sum-exp [rows, Hq], sinks included.

    `out` may have the queries of a sequence as an axis: [S, Q, Hq, Dv].
    """
    if state.o.size:
        flat = _arrays.flatten(out)
        where = rows_cuda.by_query((flat.offset, *flat.strides))
        queries = out.shape[1] if len(out.shape) == 4 else 1
        sinks_at = rows_cuda.locate(sinks, 1)
        args = (state.m, state.l, state.o, flat.memory, where, queries, sinks_at, lse)
        _launch_rows(_finalize(dtype), state, *args)


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
    """Compile the step kernel for one `_plan_cuda.StepVariant`."""
    head_dim, v_head_dim, wide, formats, capped, biased, token_scales = variant
    threads = variant.threads
    warps = threads // WARP
    k_dtype, v_dtype = (_arrays.CARRIERS[name] for name in formats[1:])
    load_q, load_k, load_v = (warp.LOADERS[name] for name in formats)
    copy = warp.copy_16_bytes if wide else warp.copy_element
    k_width, v_width = (_plan_cuda.WIDE // x.itemsize if wide else 1 for x in (k_dtype, v_dtype))
    k_size, v_size, scales_size = TILE * head_dim, TILE * v_head_dim, SPLIT if token_scales else 1
    # Loops of constant length, with a guard: they are unrolled, and their offsets are constants.
    tokens_per_warp = _plan.ceil_div(TILE, warps)
    columns_per_lane = _plan.ceil_div(head_dim, WARP)
    columns_per_thread = _plan.ceil_div(v_head_dim, threads)

    @cuda_function
    def find_factors(where, factors, head, kv):
        """Return what shapes a logit, and the factor of o: by kv head, unless by token."""
        (k_factor, softcap), v_factor, slope = factors, recurrence.ONE, recurrence.ZERO
        if not token_scales:
            k_factor *= rows_cuda.scale(where.k_scale, 0, 0, kv)
            v_factor = rows_cuda.scale(where.v_scale, 0, 0, kv)
        if biased:
            slope = warp.load_float32(where.slopes[0] + head * where.slopes[1], slope)
        return (k_factor, softcap, slope), v_factor

    @cuda_function
    def list_tokens(lists, tables, table, where, kv, block_size, begin, count, thread):
        """List where the rows of K and of V are, token by token, and their scales."""
        k_rows, v_rows, k_scales, v_scales = lists
        k, v = where.k, where.v
        for t in range(thread, count, threads):
            column = warp.divide(begin + t, block_size)
            slot = begin + t - column * block_size
            block = np.int64(tables[table + column * where.table[2]])
            k_rows[t] = k[0] + block * k[1] + slot * k[2] + kv * k[3]
            v_rows[t] = v[0] + block * v[1] + slot * v[2] + kv * v[3]
            if token_scales:
                k_scales[t] = rows_cuda.scale(where.k_scale, block, slot, kv)
                v_scales[t] = rows_cuda.scale(where.v_scale, block, slot, kv)

    @cuda_function
    def stage(tile, dim, width, pool, rows, first, count, thread):
        """Copy rows first..first + count of a split to shared memory."""
        chunks = dim // width
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
                s += query[d] * load_k(k_tile, t * head_dim + d)
        return s

    @cuda_function
    def logit(s, shape, scales, t, distance):
        """Return q . k as a logit: scaled, capped, biased."""
        factor, softcap, slope = shape
        if token_scales:
            factor *= scales[t]
        s *= factor
        if capped:
            s = recurrence.softcapped(s, softcap)
        if biased:
            s += slope * np.float32(distance + t)
        return s

    @cuda_function
    def score(scores, query, k_tile, count, thread, shape, scales, first, distance):
        """Write the logits of a tile, a warp for each token; it begins `first` tokens on."""
        lane, own_warp = thread & (WARP - 1), thread // WARP
        for turn in range(tokens_per_warp):
            t = own_warp + turn * warps
            if t < count:
                s = warp.warp_sum(dot(query, k_tile, t, lane))
                if lane == 0:
                    scores[t] = logit(s, shape, scales, first + t, distance)

    @cuda_function
    def add_values(x, weights, v_tile, d, count):
        """Return x + p . v for one column."""
        for t in range(TILE):
            if t < count:
                x += weights[t] * load_v(v_tile, t * v_head_dim + d)
        return x

    @cuda_function
    def accumulate(o_split, rescale, weights, v_tile, count, thread):
        """Bring o to the new maximum and add p . v, column by column."""
        for turn in range(columns_per_thread):
            d = thread + turn * threads
            if d < v_head_dim:
                o_split[d] = add_values(o_split[d] * rescale, weights, v_tile, d, count)

    def step(q, k_pool, v_pool, tables, where, lists, sizes, factors, m, l, o):
        query = cuda.shared.array(head_dim, np.float32)
        k_rows = cuda.shared.array(SPLIT, np.int64)
        v_rows = cuda.shared.array(SPLIT, np.int64)
        k_scales = cuda.shared.array(scales_size, np.float32)
        v_scales = cuda.shared.array(scales_size, np.float32)
        k_tile = cuda.shared.array(k_size, k_dtype, alignment=16)
        v_tile = cuda.shared.array(v_size, v_dtype, alignment=16)
        scores = cuda.shared.array(TILE, np.float32)
        weights = cuda.shared.array(TILE, np.float32)
        v_weights = cuda.shared.array(TILE, np.float32) if token_scales else weights
        o_split = cuda.shared.array(v_head_dim, np.float32)
        thread = cuda.threadIdx.x
        row, head = _row_of_block(sizes.num_q_heads)
        seq, begin, end, origin, place = rows_cuda.find(row, lists, sizes)
        if begin == end:
            return
        kv = warp.divide(head, sizes.gqa)
        at = rows_cuda.offset(where.q, row, sizes.queries, head)
        for d in range(thread, head_dim, threads):
            query[d] = load_q(q, at + d)
        shape, v_factor = find_factors(where, factors, head, kv)
        m_row, l_row, o_row = m[row, head], l[row, head], o[row, head]
        tokens = k_rows, v_rows, k_scales, v_scales
        table = where.table[0] + seq * where.table[1]
        for split in range(begin - ((begin - origin) & (SPLIT - 1)), end, SPLIT):
            low, high = max(split, begin), min(split + SPLIT, end)
            list_tokens(tokens, tables, table, where, kv, sizes.block_size, low, high - low, thread)
            m2, l2 = recurrence.NEG_INF, recurrence.ZERO
            for d in range(thread, v_head_dim, threads):
                o_split[d] = recurrence.ZERO
            cuda.syncthreads()
            for first in range(0, high - low, TILE):
                count = min(TILE, high - low - first)
                # load
                stage(k_tile, head_dim, k_width, k_pool, k_rows, first, count, thread)
                stage(v_tile, v_head_dim, v_width, v_pool, v_rows, first, count, thread)
                cuda.syncthreads()
                # score
                distance = low - place
                score(scores, query, k_tile, count, thread, shape, k_scales, first, distance)
                cuda.syncthreads()
                # absorb
                m_new = _largest(m2, scores, count)
                if thread < count:
                    weights[thread] = recurrence.weight(scores[thread], m_new)
                    if token_scales:
                        v_weights[thread] = weights[thread] * v_scales[first + thread]
                cuda.syncthreads()
                rescale = recurrence.weight(m2, m_new)
                m2, l2 = m_new, _total(l2 * rescale, weights, count)
                # accumulate
                accumulate(o_split, rescale, v_weights, v_tile, count, thread)
                cuda.syncthreads()
            # store
            for d in range(thread, v_head_dim, threads):
                o_split[d] *= v_factor
            m_row, l_row = _fold(m_row, l_row, o_row, m2, l2, o_split, thread, threads)
        if thread == 0:
            m[row, head], l[row, head] = m_row, l_row

    return cuda_kernel(step, (threads, RESIDENT_THREADS // threads))


@cuda_function
def _row_of_block(num_q_heads):
    """Return the row and the query head of this block; heads come first."""
    row = warp.divide(cuda.blockIdx.x, num_q_heads)
    return row, cuda.blockIdx.x - row * num_q_heads


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


@functools.cache
def _finalize(dtype):
    """Compile the kernel that normalises into a number format."""
    narrow = warp.narrow(dtype)

    @cuda_kernel
    def finalize_rows(m, l, o, out, where, queries, sinks, lse):
        row, head = _row_of_block(m.shape[1])
        to = rows_cuda.offset(where, row, queries, head)
        sink = warp.load_float32(sinks[0] + head * sinks[1], recurrence.NEG_INF)
        m_all, l_all, factor = recurrence.with_sink(m[row, head], l[row, head], sink)
        for d in range(cuda.threadIdx.x, o.shape[2], WARP):
            out[to + d] = narrow(recurrence.normalise(o[row, head, d] * factor, l_all))
        if cuda.threadIdx.x == 0:
            lse[row, head] = recurrence.log_sum_exp(m_all, l_all)

    return finalize_rows


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
