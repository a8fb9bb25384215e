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
from ._formats import BFLOAT16, FORMATS, has_pairs, number
from ._jit import kernel, shared
from ._vector import LANES, has_pair_dot

GROUP = _plan.GROUP_TOKENS
SPLIT = _plan.SPLIT_TOKENS
PAIR_DOT_SCALE = 65536.0  # see rows.pack
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
    starts, items, tokens = _plan.cut(tile, options.sliding_window, options.causal)
    if len(items) == 0:
        return
    block_size, num_kv_heads, head_dim = k_pool.shape[1:]
    v_head_dim = v_pool.shape[3]
    queries = q if q.ndim == 3 else q.reshape(-1, *q.shape[-2:])
    gqa = queries.shape[1] // num_kv_heads
    attend_items = _attend_items(gqa, head_dim, v_head_dim, formats, _used(options))
    partials = _take_partials((len(items), queries.shape[1], v_head_dim))
    args = (
        np.zeros(1, np.int64),
        items,
        *(_locate(array) for array in (queries, k_pool, v_pool, tile.tables)),
        (block_size, num_kv_heads),
        _factors(options, formats, gqa, k_pool.shape[:3]),
        *partials,
    )
    token_bytes = num_kv_heads * (head_dim * k_pool.itemsize + v_head_dim * v_pool.itemsize)
    useful = 1 + tokens * token_bytes // SERIAL_BYTES
    _threads.run(attend_items, args, min(_threads.get_num_threads(), len(items), useful))
    merge_splits(state, partials, starts)
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
    """Write o / l as `dtype` [rows, Hq, Dv] and the log-sum-exp [rows, Hq], sinks included."""
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
    """Partial states of n work items."""

    m: np.ndarray  # [n, Hq]
    l: np.ndarray  # [n, Hq]
    o: np.ndarray  # [n, Hq, Dv]


_scratch = threading.local()


def _take_partials(shape):
    """Return partials [n, Hq, Dv] to write into: this thread's last ones, where the shape fits.

    Fresh memory would be mapped and cleared by the system at every call. They are taken, and given
    back at the end: a signal handler may call in between.
    """
    last = _scratch.__dict__.pop("partials", None)
    if last is not None and last.o.shape == shape:
        return last
    m, l = (np.empty(shape[:2], np.float32) for _ in range(2))
    return _Partials(m, l, np.empty(shape, np.float32))


def _locate(array):
    """Return (address, byte strides of all axes but the last)."""
    return (array.__array_interface__["data"][0], *array.strides[:-1])


def _locate_all(array):
    """Return (address, byte strides of all axes)."""
    return (array.__array_interface__["data"][0], *array.strides)


def _used(options):
    """Return which options of `logits.absorb` a call uses, as bits."""
    used = logits.CAPPED * (options.softcap > 0) + logits.SCALED * options.token_scales()
    return used + logits.BIASED * (options.alibi_slopes is not None)


class _Factors(NamedTuple):
    """What scales and shapes logits and values."""

    heads: np.ndarray  # float32 [Hkv, 2], of a product q . k, of a partial o
    k_tokens: tuple[int, ...]  # address and strides of float32 [N, B, Hkv], or zeros
    v_tokens: tuple[int, ...]
    softcap: float
    slopes: np.ndarray  # float32 [Hkv, lanes], by lane of m; [Hkv, 0] without


def _factors(options, formats, gqa, shape):
    """Prepare the factors of a call for pools of shape [N, B, Hkv]."""
    num_kv_heads = shape[2]
    if options.k_scale is options.v_scale is options.alibi_slopes is None:
        return _same_factors(options.scale, options.softcap, formats, num_kv_heads)
    by_token = options.token_scales()
    heads, tokens = np.empty((num_kv_heads, 2), np.float32), []
    for which, (scale, common) in enumerate(
        zip((options.k_scale, options.v_scale), _common(options.scale, formats), strict=True)
    ):
        scale = recurrence.ONE if scale is None else scale
        heads[:, which] = common if by_token else scale * common
        every = np.broadcast_to(scale, shape) if by_token else None
        tokens.append(_locate_all(every) if by_token else (0, 0, 0, 0))
    slopes = np.empty((num_kv_heads, 0), np.float32)
    if options.alibi_slopes is not None:
        by_head = options.alibi_slopes.reshape(num_kv_heads, gqa)
        slopes = np.ascontiguousarray(by_head[:, logits.head_of_lanes(gqa)])
    return _Factors(heads, *tokens, options.softcap, slopes)


def _common(scale, formats):
    """Return the factors of all keys and of all values."""
    return scale * FORMATS[number(formats.k)].factor, FORMATS[number(formats.v)].factor


@functools.lru_cache(maxsize=16)
def _same_factors(scale, softcap, formats, num_kv_heads):
    """Return the factors where all tokens and heads have the same."""
    heads = np.full((num_kv_heads, 2), _common(scale, formats), np.float32)
    zeros = (0, 0, 0, 0)
    return _Factors(heads, zeros, zeros, softcap, np.empty((num_kv_heads, 0), np.float32))


@functools.cache
def _attend_items(gqa, head_dim, v_head_dim, formats, options):
    """Return the kernel that takes items from the counter and writes their partial states.

    One is compiled per set of arguments; everything else is a run-time value.
    """
    q_format, k_format, v_format = map(number, formats)
    width, v_width = rows.padded(head_dim), rows.padded(v_head_dim)
    tile_tokens, lanes = logits.tile_tokens(gqa), logits.head_tiles(gqa) * LANES
    logits_size = logits.logits_size(gqa)
    pair_dot = int(has_pair_dot() and q_format == BFLOAT16 and has_pairs(k_format))
    scaled = int(options & logits.SCALED > 0)
    # Tokens per load and store of o: few keep the reads in address order, many save arithmetic,
    # which is the limit from 5 heads on.
    strip = 8 if gqa <= 4 else GROUP

    @kernel
    def attend_items(counter, items, q, k_pool, v_pool, tables, sizes, factors, m, l, o):
        block_size, num_kv_heads = sizes
        addresses = np.empty(2 * SPLIT + 2 * GROUP, np.int64)
        scale_addresses = np.empty((2 * SPLIT + 2 * GROUP) * scaled, np.int64)
        token_scales = _aligned(num_kv_heads, 2 * GROUP * scaled)
        queries = _aligned(num_kv_heads, gqa * width)
        packed = _aligned(num_kv_heads, gqa * width // 2 * pair_dot)  # q again, as bfloat16
        weights = _aligned(num_kv_heads, logits_size)  # logits, then p
        maxima = _aligned(num_kv_heads, lanes)  # m
        sums = _aligned(num_kv_heads, lanes)  # l
        values = _aligned(num_kv_heads, gqa * v_width)  # o
        rescale = _aligned(num_kv_heads, lanes)
        ones = _aligned(1, lanes)
        ones[:] = recurrence.ONE
        while True:
            item = rows.fetch_add(counter.ctypes.data, 1)
            if item >= len(items):
                break
            begin, end, part = np.int64(items[item, 2]), np.int64(items[item, 3]), items[item, 4]
            # load
            table = tables[0] + items[item, 1] * tables[1]
            _list_rows(addresses, begin, end - begin, block_size, table, k_pool, v_pool)
            if scaled:
                k_tokens, v_tokens = factors.k_tokens, factors.v_tokens
                _list_rows(
                    scale_addresses, begin, end - begin, block_size, table, k_tokens, v_tokens
                )
            tame = pair_dot
            for kv in range(num_kv_heads):
                if factors.heads[kv, 0] > PAIR_DOT_SCALE:
                    tame = 0
                for g in range(gqa):
                    row = q[0] + items[item, 0] * q[1] + (kv * gqa + g) * q[2]
                    to = _at(queries, kv) + 4 * width * g
                    rows.widen(row, to, head_dim, q_format, k_format)
                    if pair_dot:
                        tame &= rows.pack(row, _at(packed, kv) + 2 * width * g, head_dim)
            maxima[:], sums[:], values[:] = recurrence.NEG_INF, recurrence.ZERO, recurrence.ZERO
            for group in range(0, end - begin, GROUP):
                count = min(GROUP, end - begin - group)
                k_rows = addresses.ctypes.data + 16 * group
                v_rows = k_rows + 8 * GROUP
                # score
                for tile in range(-(-count // tile_tokens)):
                    here = k_rows + 8 * tile * tile_tokens
                    for kv in range(num_kv_heads):
                        q_h, pairs, s = _at(queries, kv), tame * _at(packed, kv), _at(weights, kv)
                        ahead, offset = here + 8 * GROUP, kv * k_pool[3]
                        simd.score(
                            q_h,
                            pairs,
                            here,
                            ahead,
                            offset,
                            tile,
                            s,
                            gqa,
                            head_dim,
                            k_format,
                            pair_dot,
                        )
                # absorb
                distance = np.int32(begin + group - items[item, 5])
                for kv in range(num_kv_heads):
                    if scaled:
                        k_token, v_token = kv * k_tokens[3], kv * v_tokens[3]
                        at = scale_addresses.ctypes.data + 16 * group
                        _gather(token_scales[kv], at, count, k_token, v_token)
                    logits.absorb(
                        _at(weights, kv),
                        np.int32(count),
                        _at(maxima, kv),
                        _at(sums, kv),
                        _at(rescale, kv),
                        factors.heads[kv, 0],
                        np.float32(factors.softcap),
                        _at(factors.slopes, kv),
                        distance,
                        _at(token_scales, kv),
                        gqa,
                        options,
                    )
                # accumulate
                whole = count - count % strip  # in strips; the tokens of the rest come singly
                scratch = (weights, values, rescale, ones)
                for t in range(0, whole, strip):
                    _accumulate(t, v_rows, v_pool[3], scratch, gqa, v_head_dim, v_format, strip)
                for t in range(whole, count):
                    _accumulate(t, v_rows, v_pool[3], scratch, gqa, v_head_dim, v_format, 1)
            # store
            for kv in range(num_kv_heads):
                h = kv * gqa
                to_m, to_l = m[part, h:].ctypes.data, l[part, h:].ctypes.data
                logits.store_state(_at(maxima, kv), _at(sums, kv), to_m, to_l, gqa)
                for g in range(gqa):
                    row, to = _at(values, kv) + 4 * v_width * g, o[part, h + g].ctypes.data
                    rows.natural_order(row, factors.heads[kv, 1], to, v_head_dim, v_format)

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
def _accumulate(t, v_rows, v_head, scratch, gqa, v_head_dim, v_format, count):
    """Accumulate tokens t to t + count of a group, all heads; the last four are literal."""
    weights, values, rescale, ones = scratch
    here = v_rows + 8 * t
    for kv in range(len(weights)):
        p, o_h, ahead, offset = _at(weights, kv), _at(values, kv), here + 8 * GROUP, kv * v_head
        factor = _at(rescale, kv) if t == 0 else _at(ones, 0)
        simd.accumulate(p, t, here, ahead, offset, factor, o_h, gqa, v_head_dim, v_format, count)


@shared
def _gather(scales, addresses, count, k_offset, v_offset):
    """Copy the scales of a group's keys and values into scales [2 * 16]."""
    for t in range(count):
        at_k = rows.load_int64(addresses + 8 * t)
        at_v = rows.load_int64(addresses + 8 * (GROUP + t))
        scales[t] = rows.load_float32(at_k + k_offset)
        scales[GROUP + t] = rows.load_float32(at_v + v_offset)


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
