"""The CPU twin: the recurrence as vector code over splits of tokens.

A work item is one split of one sequence with all its heads, so that K/V are read in address order
and every query head of a kv head shares each row. Items come from a shared counter; each gives a
partial state, and the partials are folded into the state in item order.
"""

import functools
import threading
from typing import NamedTuple

import numpy as np

from .. import _plan, _threads
from . import logits, recurrence, rows, simd
from ._formats import BFLOAT16, has_pairs, number
from ._jit import kernel, shared
from ._vector import LANES, has_pair_dot
from .scaling import locate, options_used, scaling_of

GROUP = _plan.GROUP_TOKENS
SPLIT = _plan.SPLIT_TOKENS
PAIR_DOT_SCALE = 65536.0  # see rows.pack
PARTIAL_BYTES = 1 << 26  # of the partial states at a time
SERIAL_BYTES = 1 << 20  # K/V bytes that are read in less time than it takes to wake a thread


def step_tile(state, q, k_pool, v_pool, formats, tile, options):
    """Absorb a tile: one partial state per split, folded into `state`.

    Parameters
    ----------
    state : AttentionState
        float32 m [rows, Hq], l [rows, Hq], o [rows, Hq, Dv]; modified.
    q : [rows, Hq, D] or [S, Q, Hq, D]
    k_pool, v_pool : [N, B, Hkv, D], [N, B, Hkv, Dv]
    formats : Formats
        Of q and the pools.
    tile : Tile
        The keys, int32 on the host.
    options : Options
    """
    cut = _plan.cut(tile, options.sliding_window, options.causal)
    threads = _threads.get_num_threads()
    for fold, _ in attend(cut, q, k_pool, v_pool, formats, tile, options, threads):
        fold(state)


def attend(cut, q, k_pool, v_pool, formats, tile, options, num_threads):
    """Compute the partial states of a cut, by rows as many as there is memory for.

    Yields
    ------
    callable, bool
        Folds them into a whole state, once and in this order; whether these are the last.
    """
    if len(cut.items) == 0:
        return
    block_size, num_kv_heads, head_dim = k_pool.shape[1:]
    v_head_dim = v_pool.shape[3]
    queries = q if q.ndim == 3 else q.reshape(-1, *q.shape[-2:])
    gqa = queries.shape[1] // num_kv_heads
    attend_items = _attend_items(gqa, head_dim, v_head_dim, formats, options_used(options))
    inputs = (
        *(locate(array) for array in (queries, k_pool, v_pool, tile.tables)),
        (block_size, num_kv_heads),
        scaling_of(options, formats, gqa, k_pool.shape[:3]),
    )
    token_bytes = num_kv_heads * (head_dim * k_pool.itemsize + v_head_dim * v_pool.itemsize)
    most_items = PARTIAL_BYTES // (4 * queries.shape[1] * (v_head_dim + 2))
    for first, end, (starts, items, tokens) in _plan.batches(cut, most_items):
        partials = _take_partials((len(items), queries.shape[1], v_head_dim))
        args = (np.zeros(1, np.int64), items, *inputs, *partials)
        useful = 1 + tokens * token_bytes // SERIAL_BYTES
        _threads.run(attend_items, args, min(num_threads, len(items), useful))
        yield functools.partial(_fold_rows, first, end, partials, starts), end == len(queries)


def _fold_rows(first, end, partials, starts, state):
    some_rows = _Partials(state.m[first:end], state.l[first:end], state.o[first:end])
    merge_splits(some_rows, partials, starts)
    _scratch.partials = partials


def merge_splits(state, partials, starts):
    """Fold partial states into `state`, in order: a strict left fold.

    Parameters
    ----------
    state : float32 m [S, Hq], l [S, Hq], o [S, Hq, Dv]; modified.
    partials : float32 m [n, Hq], l [n, Hq], o [n, Hq, Dv]
    starts : int32 [S + 1]
        The partials of sequence s are starts[s] to starts[s + 1].
    """
    _merge_splits(state.m, state.l, state.o, partials.m, partials.l, partials.o, starts)


def finalize(state, sinks, out, lse, dtype):
    """Write o / l as `dtype` [rows, Hq, Dv] and the log-sum-exp [rows, Hq], sinks included.

    `lse` may be None.
    """
    lse = np.empty_like(state.m) if lse is None else lse
    bits = out if out.flags.c_contiguous else np.empty(out.shape, out.dtype)
    if sinks is None:
        sinks = _no_sinks(state.m.shape[1])
    _finalize(dtype)(state.m, state.l, state.o, sinks, bits.reshape(state.o.shape), lse)
    if bits is not out:
        out[...] = bits


@functools.lru_cache(maxsize=16)
def _no_sinks(num_q_heads):
    return np.full(num_q_heads, recurrence.NEG_INF)


class _Partials(NamedTuple):
    """Partial states of n work items, or some rows of a state."""

    m: np.ndarray  # [n, Hq]
    l: np.ndarray  # [n, Hq]
    o: np.ndarray  # [n, Hq, Dv]


_scratch = threading.local()


def _take_partials(shape):
    """Return partials [n, Hq, Dv] to write into: this thread's last ones, where the shape fits.

    Fresh memory would be mapped and cleared by the system at every call. They are taken, and given
    back when they are folded: a signal handler may call in between.
    """
    last = _scratch.__dict__.pop("partials", None)
    if last is not None and last.o.shape == shape:
        return last
    m, l = (np.empty(shape[:2], np.float32) for _ in range(2))
    return _Partials(m, l, np.empty(shape, np.float32))


class _Scratch(NamedTuple):
    """A thread's working memory for one item: a row for each kv head, in the order of `logits`."""

    queries: np.ndarray  # q, widened
    packed: np.ndarray  # q as pairs of bfloat16, for the pair dot product
    weights: np.ndarray  # of a group: logits, then p
    maxima: np.ndarray  # m
    sums: np.ndarray  # l
    values: np.ndarray  # o
    rescale: np.ndarray  # of a group: the factor of o
    ones: np.ndarray  # that factor for the rest of the group
    token_scales: np.ndarray  # of a group: 16 of K, 16 of V


@functools.cache
def _attend_items(gqa, head_dim, v_head_dim, formats, options):
    """Return the kernel that takes items from the counter and writes their partial states.

    One is compiled per set of arguments; everything else is a run-time value.
    """
    q_format, k_format, v_format = map(number, formats)
    width, v_width = rows.padded(head_dim), rows.padded(v_head_dim)
    tile_tokens, lanes = logits.tile_tokens(gqa), logits.head_tiles(gqa) * LANES
    logits_size = logits.logits_size(gqa)
    scaled = int(options & logits.SCALED > 0)
    # What a token's own scale may magnify must not have been counted as 0.
    pairs = q_format == BFLOAT16 and has_pairs(k_format) and not scaled
    pair_dot = int(pairs and has_pair_dot())
    # Tokens per load and store of o: few keep the reads in address order, many save arithmetic,
    # which is the limit from 5 heads on.
    strip = 8 if gqa <= 4 else GROUP

    @kernel
    def attend_items(counter, items, q, k_pool, v_pool, tables, sizes, scaling, m, l, o):
        block_size, num_kv_heads = sizes
        addresses = np.empty(2 * SPLIT + 2 * GROUP, np.int64)
        scale_addresses = np.empty((2 * SPLIT + 2 * GROUP) * scaled, np.int64)
        scratch = _Scratch(
            _aligned(num_kv_heads, gqa * width),
            _aligned(num_kv_heads, gqa * width // 2 * pair_dot),
            _aligned(num_kv_heads, logits_size),
            _aligned(num_kv_heads, lanes),
            _aligned(num_kv_heads, lanes),
            _aligned(num_kv_heads, gqa * v_width),
            _aligned(num_kv_heads, lanes),
            _aligned(num_kv_heads, lanes),
            _aligned(num_kv_heads, 2 * GROUP * scaled),
        )
        scratch.ones[:] = recurrence.ONE
        while True:
            item = rows.fetch_add(counter.ctypes.data, 1)
            if item >= len(items):
                break
            begin, tokens = np.int64(items[item, 2]), np.int64(items[item, 3] - items[item, 2])
            # load
            table = tables[0] + items[item, 1] * tables[1]
            _list_rows(addresses, begin, tokens, block_size, table, k_pool, v_pool)
            if scaled:
                k_tokens, v_tokens = scaling.k_tokens, scaling.v_tokens
                _list_rows(scale_addresses, begin, tokens, block_size, table, k_tokens, v_tokens)
            q_row = q[0] + items[item, 0] * q[1]
            _load_queries(scratch, q_row, q[2], gqa, head_dim, q_format, k_format)
            tame = 0
            if pair_dot:
                tame = _pack_queries(scratch, q_row, q[2], scaling, gqa, head_dim)
            scratch.maxima[:], scratch.sums[:] = recurrence.NEG_INF, recurrence.ZERO
            scratch.values[:] = recurrence.ZERO
            for group in range(0, tokens, GROUP):
                count = min(GROUP, tokens - group)
                k_rows = addresses.ctypes.data + 16 * group
                # score
                for tile in range(-(-count // tile_tokens)):
                    here = k_rows + 8 * tile * tile_tokens
                    _score(scratch, tile, here, k_pool[3], tame, gqa, head_dim, k_format, pair_dot)
                # absorb
                if scaled:
                    _gather(scratch, count, scale_addresses.ctypes.data + 16 * group, scaling)
                distance = np.int32(begin + group - items[item, 5])
                _absorb(scratch, count, scaling, distance, gqa, options)
                # accumulate
                v_rows = k_rows + 8 * GROUP
                whole = count - count % strip  # in strips; the tokens of the rest come singly
                for t in range(0, whole, strip):
                    _accumulate(scratch, t, v_rows, v_pool[3], gqa, v_head_dim, v_format, strip)
                for t in range(whole, count):
                    _accumulate(scratch, t, v_rows, v_pool[3], gqa, v_head_dim, v_format, 1)
            # store
            part = items[item, 4]
            _store(scratch, scaling, m[part], l[part], o[part], gqa, v_head_dim, v_format)

    return attend_items


@shared
def _aligned(num_rows, size):
    """Allocate float32 [num_rows, size], each row at the start of a cache line."""
    size = -(-size // 16) * 16
    raw = np.empty(num_rows * size + 16, np.float32)
    skip = (-raw.ctypes.data % 64) // 4
    return raw[skip : skip + num_rows * size].reshape(num_rows, size)


@shared
def _at(array, row):
    """Return the address of a row."""
    return array[row].ctypes.data


@shared
def _load_queries(scratch, q_row, q_head, gqa, head_dim, q_format, k_format):
    """Widen the query heads into the row order of K; the last four are literal."""
    row_bytes = scratch.queries.shape[1] // gqa * 4
    for kv in range(len(scratch.queries)):
        for g in range(gqa):
            to = _at(scratch.queries, kv) + g * row_bytes
            rows.widen(q_row + (kv * gqa + g) * q_head, to, head_dim, q_format, k_format)


@shared
def _pack_queries(scratch, q_row, q_head, scaling, gqa, head_dim):
    """Copy the query heads for the pair dot product; tell (1 or 0) whether it may be used."""
    row_bytes = scratch.packed.shape[1] // gqa * 4
    tame = np.int64(1)
    for kv in range(len(scratch.packed)):
        if scaling.heads[kv, 0] > PAIR_DOT_SCALE:
            tame = np.int64(0)
        for g in range(gqa):
            to = _at(scratch.packed, kv) + g * row_bytes
            tame &= rows.pack(q_row + (kv * gqa + g) * q_head, to, head_dim)
    return tame


@shared
def _score(scratch, tile, k_rows, k_head, tame, gqa, head_dim, k_format, pair_dot):
    """Score a token tile of a group, all heads; the last four are literal."""
    ahead = k_rows + 8 * GROUP
    for kv in range(len(scratch.queries)):
        q, pairs = _at(scratch.queries, kv), tame * _at(scratch.packed, kv)
        s, offset = _at(scratch.weights, kv), kv * k_head
        simd.score(q, pairs, k_rows, ahead, offset, tile, s, gqa, head_dim, k_format, pair_dot)


@shared
def _gather(scratch, count, addresses, scaling):
    """Copy the scales of a group's keys and values from where they are listed."""
    for kv in range(len(scratch.token_scales)):
        scales = scratch.token_scales[kv]
        for t in range(count):
            at_k = rows.load_int64(addresses + 8 * t) + kv * scaling.k_tokens[3]
            at_v = rows.load_int64(addresses + 8 * (GROUP + t)) + kv * scaling.v_tokens[3]
            scales[t], scales[GROUP + t] = rows.load_float32(at_k), rows.load_float32(at_v)


@shared
def _absorb(scratch, count, scaling, distance, gqa, options):
    """Absorb a group's logits, all heads; the last two are literal."""
    count, softcap = np.int32(count), np.float32(scaling.softcap)
    for kv in range(len(scratch.weights)):
        p, factor = _at(scratch.weights, kv), _at(scratch.rescale, kv)
        m, l = _at(scratch.maxima, kv), _at(scratch.sums, kv)
        scale, slopes = scaling.heads[kv, 0], _at(scaling.slopes, kv)
        tokens = _at(scratch.token_scales, kv)
        logits.absorb(
            p, count, m, l, factor, scale, softcap, slopes, distance, tokens, gqa, options
        )


@shared
def _accumulate(scratch, t, v_rows, v_head, gqa, v_head_dim, v_format, count):
    """Accumulate tokens t to t + count of a group, all heads; the last four are literal."""
    here = v_rows + 8 * t
    for kv in range(len(scratch.weights)):
        p, o, offset = _at(scratch.weights, kv), _at(scratch.values, kv), kv * v_head
        factor = _at(scratch.rescale, kv) if t == 0 else _at(scratch.ones, kv)
        ahead = here + 8 * GROUP
        simd.accumulate(p, t, here, ahead, offset, factor, o, gqa, v_head_dim, v_format, count)


@shared
def _store(scratch, scaling, m, l, o, gqa, v_head_dim, v_format):
    """Store a partial state (m, l, o), [Hq] and [Hq, Dv]; the last three are literal."""
    row_bytes = scratch.values.shape[1] // gqa * 4
    for kv in range(len(scratch.values)):
        h = kv * gqa
        sums = _at(scratch.sums, kv)
        logits.store_state(_at(scratch.maxima, kv), sums, m[h:].ctypes.data, l[h:].ctypes.data, gqa)
        for g in range(gqa):
            row, to = _at(scratch.values, kv) + g * row_bytes, o[h + g].ctypes.data
            rows.natural_order(row, scaling.heads[kv, 1], to, v_head_dim, v_format)


@shared
def _list_rows(addresses, begin, tokens, block_size, table, k_pool, v_pool):
    """List the row addresses of a split in the order they are read: 16 of K, 16 of V, and so on.

    So what is 16 places ahead of a row is read next, and is prefetched meanwhile. The last row
    stands in for what lies past the end.
    """
    k_address, k_block, k_token = k_pool[0], k_pool[1], k_pool[2]
    v_address, v_block, v_token = v_pool[0], v_pool[1], v_pool[2]
    column, slot = begin // block_size, begin % block_size
    k_row, v_row = np.int64(0), np.int64(0)
    for t in range(-(-tokens // GROUP) * GROUP):
        if t < tokens:
            block = np.int64(rows.load_int32(table + 4 * column))
            k_row = k_address + block * k_block + slot * k_token
            v_row = v_address + block * v_block + slot * v_token
            slot += 1
            if slot == block_size:
                slot = 0
                column += 1
        at = t // GROUP * 2 * GROUP + t % GROUP
        addresses[at], addresses[at + GROUP] = k_row, v_row
    end = -(-tokens // GROUP) * 2 * GROUP
    addresses[end : end + 2 * GROUP] = v_row


@kernel
def _merge_splits(m, l, o, part_m, part_l, part_o, starts):
    """Left fold: state = merge(state, partial), partial by partial."""
    for seq in range(m.shape[0]):
        for part in range(starts[seq], starts[seq + 1]):
            for h in range(m.shape[1]):
                m2, l2 = part_m[part, h], part_l[part, h]
                if recurrence.is_empty(m2, l2):
                    continue
                if recurrence.is_empty(m[seq, h], l[seq, h]):
                    m[seq, h], l[seq, h] = m2, l2
                    o[seq, h] = part_o[part, h]
                    continue
                m_new = recurrence.larger(m[seq, h], m2)
                a = recurrence.weight(m[seq, h], m_new)
                b = recurrence.weight(m2, m_new)
                l[seq, h] = l[seq, h] * a + l2 * b
                for d in range(o.shape[2]):
                    o[seq, h, d] = o[seq, h, d] * a + part_o[part, h, d] * b
                m[seq, h] = m_new


@functools.cache
def _finalize(dtype):
    """Return the kernel that normalises into a number format."""
    is_bfloat16, is_float16 = dtype == "bfloat16", dtype == "float16"

    @kernel
    def finalize_rows(m, l, o, sinks, out, lse):
        for row in range(m.shape[0]):
            for h in range(m.shape[1]):
                m_all, l_all, factor = recurrence.with_sink(m[row, h], l[row, h], sinks[h])
                lse[row, h] = recurrence.log_sum_exp(m_all, l_all)
                for d in range(o.shape[2]):
                    x = recurrence.normalise(o[row, h, d] * factor, l_all)
                    if is_bfloat16:
                        out[row, h, d] = recurrence.round_to_bfloat16(rows.float_bits(x))
                    elif is_float16:
                        out[row, h, d] = recurrence.round_to_float16(rows.float_bits(x))
                    else:
                        out[row, h, d] = x

    return finalize_rows
