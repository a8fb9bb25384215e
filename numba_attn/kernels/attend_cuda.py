"""From the tokens of one split to its partial state: the recurrence of both CUDA kernels.

A block of threads walks the split in tiles of 32 tokens (or 16), which wait in a ring in shared
memory.
For every tile: load (the next one begins its way) -> score (lanes that hold a row multiply it with
each query, and add up) -> absorb (a lane for each logit of a head) -> accumulate (lanes that
hold columns of o, a warp for a fourth of the tokens) -> and at the end store, into shared memory.

What threads share out among them is a loop of constant length with a guard, not a range with a
step: it is unrolled, and what does not change from tile to tile is worked out once.
"""

from typing import NamedTuple

import numpy as np

from .. import _arrays, _plan, _plan_cuda
from . import recurrence, rows_cuda, shares, warp
from ._jit import cuda_function
from ._shares import sums_given
from .warp import WARP, cuda

SPLIT = _plan_cuda.SPLIT_TOKENS

HEADS_AT_ONCE = _plan_cuda.HEADS_AT_ONCE


class Row(NamedTuple):
    """Where a block's work is: one query token, one kv head, some of its query heads."""

    query: int  # offset of the first head in q
    first_head: int
    num_heads: int  # of this block; fewer than it is compiled for in a last group
    kv_head: int
    table: int  # offset of the sequence's table
    place: int  # of the query, counted like the tokens


class Memory(NamedTuple):
    """A block's shared memory."""

    query: np.ndarray  # float32 [heads, D]
    k_rows: np.ndarray  # int64 [SPLIT], offsets of the split's rows in the pools
    v_rows: np.ndarray
    k_scales: np.ndarray  # float32 [SPLIT], if tokens have scales
    v_scales: np.ndarray
    k_ring: np.ndarray  # [stages, tile, D]
    v_ring: np.ndarray  # [stages, tile, Dv]
    scores: np.ndarray  # float32 [heads, tile]
    weights: np.ndarray  # float32 [tile, padded heads]
    factors: np.ndarray  # float32 [padded heads], from the old maximum to the new one
    m: np.ndarray  # float32 [heads]: the partial state
    l: np.ndarray
    o: np.ndarray  # float32 [heads, Dv]


def allocating(variant):
    """Return the function that makes a block's `Memory`."""
    heads, padded = variant.heads, variant.padded_heads
    k_dtype, v_dtype = (_arrays.CARRIERS[name] for name in variant.formats[1:])
    k_size, v_size = (
        variant.stages * variant.tile * deal.pitch for deal in (variant.key, variant.value)
    )
    query_size, o_size = heads * variant.key.pitch, heads * variant.value.pitch
    scores_size, weights_size = heads * variant.tile, padded * variant.tile
    scales_size = SPLIT if variant.token_scales else 1
    is_padded, zero = variant.key.pitch > variant.head_dim, k_dtype.type(0)
    threads = variant.threads

    @cuda_function
    def allocate():
        query = cuda.shared.array(query_size, np.float32, alignment=16)
        k_rows = cuda.shared.array(SPLIT, np.int64)
        v_rows = cuda.shared.array(SPLIT, np.int64)
        k_scales = cuda.shared.array(scales_size, np.float32)
        v_scales = cuda.shared.array(scales_size, np.float32)
        k_ring = cuda.shared.array(k_size, k_dtype, alignment=16)
        v_ring = cuda.shared.array(v_size, v_dtype, alignment=16)
        scores = cuda.shared.array(scores_size, np.float32)
        weights = cuda.shared.array(weights_size, np.float32, alignment=16)
        factors = cuda.shared.array(padded, np.float32, alignment=16)
        m = cuda.shared.array(heads, np.float32)
        l = cuda.shared.array(heads, np.float32)
        o = cuda.shared.array(o_size, np.float32, alignment=16)
        if is_padded:  # 0 * NaN is NaN
            for i in range(cuda.threadIdx.x, k_size, threads):
                k_ring[i] = zero
        return Memory(
            query, k_rows, v_rows, k_scales, v_scales, k_ring, v_ring,
            scores, weights, factors, m, l, o,
        )  # fmt: skip

    return allocate


def staging(variant):
    """Return the functions that list a split's rows, and copy a tile of them to shared memory."""
    threads, ring_mask = variant.threads, variant.stages - 1
    token_scales, asynchronous = variant.token_scales, variant.asynchronous
    row_turns, tile_tokens = _plan.ceil_div(SPLIT, threads), variant.tile
    copy_keys, copy_values = (
        shares.copier(name, deal, variant)
        for name, deal in zip(variant.formats[1:], (variant.key, variant.value), strict=True)
    )

    @cuda_function
    def list_rows(memory, tables, where, row, block_size, begin, count, thread):
        k, v = where.k, where.v
        for turn in range(row_turns):
            t = thread + turn * threads
            if t < count:
                column = warp.divide(begin + t, block_size)
                slot = begin + t - column * block_size
                block = np.int64(tables[row.table + column * where.table[2]])
                memory.k_rows[t] = k[0] + block * k[1] + slot * k[2] + row.kv_head * k[3]
                memory.v_rows[t] = v[0] + block * v[1] + slot * v[2] + row.kv_head * v[3]
                if token_scales:
                    memory.k_scales[t] = rows_cuda.scale(where.k_scale, block, slot, row.kv_head)
                    memory.v_scales[t] = rows_cuda.scale(where.v_scale, block, slot, row.kv_head)

    @cuda_function
    def stage(memory, k_pool, v_pool, tile, count, thread):
        """Begin to copy a tile, the last of which may have fewer tokens, or none."""
        first, slot = tile * tile_tokens, tile & ring_mask
        copy_keys(memory.k_ring, slot, k_pool, memory.k_rows, first, count, thread)
        copy_values(memory.v_ring, slot, v_pool, memory.v_rows, first, count, thread)
        if asynchronous:
            warp.end_copies()

    return list_rows, stage


def widening(variant):
    """Return the function that writes the block's queries to shared memory, padded with 0."""
    key, heads, threads = variant.key, variant.heads, variant.threads
    pitch, head_dim = key.pitch, key.length
    turns, load_q = _plan.ceil_div(heads * pitch, threads), warp.LOADERS[variant.formats[0]]

    @cuda_function
    def widen_queries(memory, q, row, head_stride, thread):
        for turn in range(turns):
            i = thread + turn * threads
            head = warp.divide(i, pitch)
            d = i - head * pitch
            if i < heads * pitch:
                x = recurrence.ZERO
                if d < head_dim and head < row.num_heads:
                    x = load_q(q, row.query + head * head_stride + d)
                memory.query[i] = x

    return widen_queries


def scoring(variant):
    """Return the function that scores a tile, some heads at a time."""
    functions = []
    for first in range(0, variant.heads, HEADS_AT_ONCE):
        functions += _scoring_heads(variant, first, min(HEADS_AT_ONCE, variant.heads - first))
    score_all = _in_turn(functions)

    @cuda_function
    def score(memory, tile, count, thread):
        """Write q . k for the tile's tokens; those past its end are of stale rows, and unread."""
        score_all(0, memory, tile, count, thread)

    return score


def _scoring_heads(variant, first_head, heads):
    """Return the functions that score some heads, each the rows that the block has at once."""
    key, tokens, ring_mask = variant.key, variant.tile, variant.stages - 1
    lanes, pitch, rows_at_once = key.lanes, key.pitch, variant.threads // key.lanes
    load_k = shares.loader(variant.formats[1], key)
    load_queries = shares.loader("float32", key, rows=heads)
    sum_rows, dots, sums = shares.row_sums(lanes, heads), shares.dots, sums_given(lanes, heads)
    stride = max(1, lanes // _plan_cuda.power_of_two(heads))  # lanes from sum to sum
    queries_at = first_head * pitch

    def scoring_rows(turn):
        @cuda_function
        def score_rows(unused, memory, tile, count, thread):
            lane, t = thread & (lanes - 1), thread // lanes + turn * rows_at_once
            start = ((tile & ring_mask) * tokens + (t & (tokens - 1))) * pitch
            query = load_queries(memory.query, queries_at, lane)
            found = sum_rows(dots(query, load_k(memory.k_ring, start, lane)))
            if t < tokens and lane % stride == 0:
                first = lane // stride * sums
                at = (first_head + first) * tokens + t
                shares.scatter(memory.scores, at, tokens, heads - first, found)
            return unused

        return score_rows

    return [scoring_rows(turn) for turn in range(_plan.ceil_div(tokens, rows_at_once))]


def absorbing(variant):
    """Return the function that turns a tile's scores into weights, and updates m and l."""
    heads, padded, threads = variant.heads, variant.padded_heads, variant.threads
    capped, biased, token_scales = variant.softcap, variant.alibi, variant.token_scales
    tokens = variant.tile
    turns = _plan.ceil_div(heads * tokens, threads)
    largest_of_tile, sum_of_tile = shares.lanes_max(tokens), shares.row_sums(tokens, 1)

    @cuda_function
    def logit(s, memory, where, factors, row, head, token, distance):
        """Return q . k as a logit: scaled, capped, biased."""
        factor, softcap = factors
        if token_scales:
            factor *= memory.k_scales[token]
        s *= factor
        if capped:
            s = recurrence.softcapped(s, softcap)
        if biased:
            at = where.slopes[0] + (row.first_head + head) * where.slopes[1]
            s += warp.load_float32(at, recurrence.ZERO) * np.float32(distance)
        return s

    @cuda_function
    def absorb(memory, where, factors, row, begin, tile, count, thread):
        t = thread & (tokens - 1)
        token = tile * tokens + t
        for turn in range(turns):
            head = thread // tokens + turn * (threads // tokens)
            m, s = recurrence.NEG_INF, recurrence.NEG_INF
            if head < heads:
                m = memory.m[head]
                if token < count and head < row.num_heads:
                    distance = begin + token - row.place
                    s = memory.scores[head * tokens + t]
                    s = logit(s, memory, where, factors, row, head, token, distance)
            m_new = largest_of_tile(recurrence.larger(m, s))  # a NaN is not in it
            weight = recurrence.weight(s, m_new)
            (total,) = sum_of_tile((weight,))
            if head < heads:
                if token_scales and token < count:
                    weight *= memory.v_scales[token]
                memory.weights[t * padded + head] = weight
                if t == 0:
                    rescale = recurrence.weight(m, m_new)
                    memory.factors[head] = rescale
                    memory.m[head] = m_new
                    memory.l[head] = memory.l[head] * rescale + total

    return absorb


def accumulating(variant):
    """Return the functions that add a tile's values to a lane's share of o, and store it."""
    value, heads, ring_mask = variant.value, variant.heads, variant.stages - 1
    padded, lanes = variant.padded_heads, value.lanes
    rows_at_once, warps = variant.threads // lanes, variant.threads // WARP
    turns = _plan.ceil_div(variant.tile, rows_at_once)
    tile_tokens, pitch, size = variant.tile, value.pitch, heads * value.pitch
    load_v = shares.loader(variant.formats[2], value)
    load_heads = shares.loader("float32", _plan_cuda.Deal(padded, padded, 1, 1))
    rescale = shares.rescaler(value.width * value.parts)
    weigh, sum_columns, add_share = shares.weigh, shares.column_sums(lanes), shares.adder(value)
    threads, o_turns = variant.threads, _plan.ceil_div(size, variant.threads)

    def adding_rows(turn):
        @cuda_function
        def add_rows(o, memory, tile, count, thread):
            lane, t = thread & (lanes - 1), thread // lanes + turn * rows_at_once
            if t < tile_tokens and tile * tile_tokens + t < count:
                start = ((tile & ring_mask) * tile_tokens + t) * pitch
                v = load_v(memory.v_ring, start, lane)
                o = weigh(o, load_heads(memory.weights, t * padded, 0), v)
            return o

        return add_rows

    add_all = _in_turn([adding_rows(turn) for turn in range(turns)])

    @cuda_function
    def accumulate(o, memory, tile, count, thread):
        """Return o, brought to the new maximum, + p . v for the lane's columns and tokens."""
        o = rescale(o, load_heads(memory.factors, 0, 0))
        return add_all(o, memory, tile, count, thread)

    @cuda_function
    def store(memory, o, v_factor, thread):
        """Add up what the warps have of o, in their order."""
        lane, own_warp = thread & (WARP - 1), thread // WARP
        o = sum_columns(o)
        for turn in range(warps):
            if own_warp == turn and lane < lanes:
                add_share(memory.o, o, lane)
            cuda.syncthreads()
        for turn in range(o_turns):
            i = thread + turn * threads
            if i < size:
                memory.o[i] *= v_factor
        cuda.syncthreads()

    return accumulate, store


def _in_turn(functions):
    """Return the function that calls all, each on the result of the one before: unrolled."""
    first, *others = functions
    if not others:
        return first
    rest = _in_turn(others)

    @cuda_function
    def both(x, memory, tile, count, thread):
        return rest(first(x, memory, tile, count, thread), memory, tile, count, thread)

    return both


def attending(variant):
    """Return the function that leaves the partial state of a split in shared memory."""
    heads, threads, ahead = variant.heads, variant.threads, variant.stages - 1
    asynchronous, token_scales = variant.asynchronous, variant.token_scales
    tile_tokens = variant.tile
    wait_for_copies = warp.waiter(max(ahead - 1, 0))
    list_rows, stage = staging(variant)
    widen_queries, score = widening(variant), scoring(variant)
    absorb = absorbing(variant)
    accumulate, store = accumulating(variant)
    size = heads * variant.value.pitch
    o_turns = _plan.ceil_div(size, threads)
    no_values = (recurrence.ZERO,) * (heads * variant.value.width * variant.value.parts)

    @cuda_function
    def start(memory, thread):
        """Return the partial state to the identity."""
        for turn in range(o_turns):
            i = thread + turn * threads
            if i < size:
                memory.o[i] = recurrence.ZERO
        if thread < heads:
            memory.m[thread], memory.l[thread] = recurrence.NEG_INF, recurrence.ZERO

    @cuda_function
    def attend(memory, q, k_pool, v_pool, tables, where, factors, row, block_size, begin, count):
        thread = cuda.threadIdx.x
        k_factor, softcap = factors
        v_factor = recurrence.ONE
        if not token_scales:
            k_factor *= rows_cuda.scale(where.k_scale, 0, 0, row.kv_head)
            v_factor = rows_cuda.scale(where.v_scale, 0, 0, row.kv_head)
        cuda.syncthreads()  # the split before is done with
        start(memory, thread)
        widen_queries(memory, q, row, where.q[3], thread)
        list_rows(memory, tables, where, row, block_size, begin, count, thread)
        cuda.syncthreads()
        o = no_values
        for tile in range(ahead):
            stage(memory, k_pool, v_pool, tile, count, thread)
        for tile in range((count + tile_tokens - 1) // tile_tokens):
            # load
            if ahead == 0:
                cuda.syncthreads()
                stage(memory, k_pool, v_pool, tile, count, thread)
            if asynchronous:
                wait_for_copies()
            cuda.syncthreads()
            if ahead > 0:
                stage(memory, k_pool, v_pool, tile + ahead, count, thread)
            # score
            score(memory, tile, count, thread)
            cuda.syncthreads()
            # absorb
            absorb(memory, where, (k_factor, softcap), row, begin, tile, count, thread)
            cuda.syncthreads()
            # accumulate
            o = accumulate(o, memory, tile, count, thread)
        # store
        store(memory, o, v_factor, thread)

    return attend
