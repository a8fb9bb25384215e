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
from . import recurrence, rows, simd
from ._jit import kernel, shared
from ._vector import LANES, has_pair_dot

GROUP = _plan.GROUP_TOKENS
SPLIT = _plan.SPLIT_TOKENS
PAIR_DOT_SCALE = 65536.0  # see rows.pack
SERIAL_BYTES = 1 << 20  # K/V bytes that are read in less time than it takes to wake a thread


def step_tile(state, q, k_pool, v_pool, tables, token_counts, scale):
    """Absorb a tile: one partial state per split, folded into `state`.

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
    starts, items = _plan.cut(token_counts)
    if len(items) == 0:
        return
    num_kv_heads, head_dim, v_head_dim = k_pool.shape[2], k_pool.shape[3], v_pool.shape[3]
    attend_items = _attend_items(q.shape[1] // num_kv_heads, head_dim, v_head_dim)
    partials = _take_partials((len(items), q.shape[1], v_head_dim))
    counter = np.zeros(1, np.int64)
    sizes = (k_pool.shape[1], num_kv_heads)
    inputs = (_locate(q), _locate(k_pool), _locate(v_pool), _locate(tables))
    args = (counter, items, *inputs, sizes, scale, *partials)
    token_bytes = 2 * num_kv_heads * (head_dim + v_head_dim)
    useful = 1 + len(items) * SPLIT * token_bytes // SERIAL_BYTES
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


def finalize(state, out, lse):
    """Write o / l as bfloat16 bits [S, Hq, Dv] and the log-sum-exp [S, Hq]."""
    bits = out if out.flags.c_contiguous else np.empty(out.shape, np.uint16)
    _finalize(state.m, state.l, state.o, bits, lse)
    if bits is not out:
        out[...] = bits


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


@functools.cache
def _attend_items(gqa, head_dim, v_head_dim):
    """Return the kernel that takes items from the counter and writes their partial states.

    One is compiled per (G, D, Dv); everything else is a run-time value.
    """
    width, v_width = rows.padded(head_dim), rows.padded(v_head_dim)
    tile_tokens, lanes = simd.tile_tokens(gqa), simd.head_tiles(gqa) * LANES
    logits = simd.logits_size(gqa)
    pair_dot = int(has_pair_dot())
    # Tokens per load and store of o: few keep the reads in address order, many save arithmetic,
    # which is the limit from 5 heads on.
    strip = 8 if gqa <= 4 else GROUP

    @kernel
    def attend_items(counter, items, q, k_pool, v_pool, tables, sizes, scale, m, l, o):
        block_size, num_kv_heads = sizes
        addresses = np.empty(2 * SPLIT + 2 * GROUP, np.int64)
        queries = _aligned(num_kv_heads, gqa * width)
        packed = _aligned(num_kv_heads, gqa * width // 2 * pair_dot)  # q again, as bfloat16
        weights = _aligned(num_kv_heads, logits)  # logits, then p
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
            seq, begin = np.int64(items[item, 0]), np.int64(items[item, 1])
            end = np.int64(items[item, 2])
            # load
            table = tables[0] + seq * tables[1]
            _list_rows(addresses, begin, end - begin, block_size, table, k_pool, v_pool)
            tame = pair_dot if scale <= PAIR_DOT_SCALE else 0
            for kv in range(num_kv_heads):
                for g in range(gqa):
                    row = q[0] + seq * q[1] + (kv * gqa + g) * q[2]
                    rows.widen(row, _at(queries, kv) + 4 * width * g, head_dim)
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
                            q_h, pairs, here, ahead, offset, tile, s, gqa, head_dim, pair_dot
                        )
                # absorb
                for kv in range(num_kv_heads):
                    p, n, factor = _at(weights, kv), np.int32(count), _at(rescale, kv)
                    simd.absorb(p, scale, n, _at(maxima, kv), _at(sums, kv), factor, gqa)
                # accumulate
                whole = count - count % strip  # in strips; the tokens of the rest come singly
                scratch = (weights, values, rescale, ones)
                for t in range(0, whole, strip):
                    _accumulate(t, v_rows, v_pool[3], scratch, gqa, v_head_dim, strip)
                for t in range(whole, count):
                    _accumulate(t, v_rows, v_pool[3], scratch, gqa, v_head_dim, 1)
            # store
            for kv in range(num_kv_heads):
                h = kv * gqa
                to_m, to_l = m[item, h:].ctypes.data, l[item, h:].ctypes.data
                simd.store_state(_at(maxima, kv), _at(sums, kv), to_m, to_l, gqa)
                for g in range(gqa):
                    row = _at(values, kv) + 4 * v_width * g
                    rows.natural_order(row, o[item, h + g].ctypes.data, v_head_dim)

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
def _accumulate(t, v_rows, v_head, scratch, gqa, v_head_dim, count):
    """Accumulate tokens t to t + count of a group, all heads; gqa, v_head_dim, count: literal."""
    weights, values, rescale, ones = scratch
    here = v_rows + 8 * t
    for kv in range(len(weights)):
        p, o_h, ahead, offset = _at(weights, kv), _at(values, kv), here + 8 * GROUP, kv * v_head
        factor = _at(rescale, kv) if t == 0 else _at(ones, 0)
        simd.accumulate(p, t, here, ahead, offset, factor, o_h, gqa, v_head_dim, count)


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


@kernel
def _finalize(m, l, o, out, lse):
    for seq in range(m.shape[0]):
        for h in range(m.shape[1]):
            lse[seq, h] = recurrence.log_sum_exp(m[seq, h], l[seq, h])
            for d in range(o.shape[2]):
                x = recurrence.normalise(o[seq, h, d], l[seq, h])
                out[seq, h, d] = recurrence.round_to_bfloat16(rows.float_bits(x))
