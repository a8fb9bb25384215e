"""The CPU twin: the recurrence as compiled loops over splits of tokens.

A work item is one split of one sequence with all its heads, so that K/V are read in address order
and every query head of a kv head shares each row. Items come from a shared counter; each gives a
partial state, and the partials are folded into the state in item order.
"""

import numpy as np

from .. import _plan, _threads
from . import recurrence, simd
from ._jit import kernel

GROUP = _plan.GROUP_TOKENS


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
    starts = _plan.split_starts(token_counts)
    items = _plan.split_items(starts, token_counts)
    if len(items) == 0:
        return
    partials = _Partials(len(items), *state.o.shape[1:])
    counter = np.zeros(1, np.int64)
    gqa = q.shape[1] // k_pool.shape[2]
    sizes = (k_pool.shape[1], k_pool.shape[2], gqa, q.shape[2], v_pool.shape[3])
    args = (counter, items, _locate(q), _locate(k_pool), _locate(v_pool), _locate(tables))
    args += (sizes, scale, partials.m, partials.l, partials.o)
    workers = min(_threads.get_num_threads(), len(items))
    _threads.run(_attend_items, [args] * workers)
    merge_splits(state, partials, starts)


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
    bits = np.empty(state.o.shape, np.uint16)
    _finalize(state.m, state.l, state.o, bits, lse)
    out[...] = bits


class _Partials:
    """Partial states of n work items."""

    def __init__(self, n, num_q_heads, v_head_dim):
        self.m = np.empty((n, num_q_heads), np.float32)
        self.l = np.empty((n, num_q_heads), np.float32)
        self.o = np.empty((n, num_q_heads, v_head_dim), np.float32)


def _locate(array):
    """Return (address, byte strides of all axes but the last)."""
    return (array.__array_interface__["data"][0], *array.strides[:-1])


@kernel
def _attend_items(counter, items, q, k_pool, v_pool, tables, sizes, scale, m, l, o):
    """Take items from the counter until none is left; write the partial state of each."""
    while True:
        item = simd.fetch_add(counter.ctypes.data, 1)
        if item >= len(items):
            break
        seq, begin, end = items[item]
        _attend(
            (seq, begin, end), q, k_pool, v_pool, tables, sizes, scale, m[item], l[item], o[item]
        )


@kernel
def _attend(item, q, k_pool, v_pool, tables, sizes, scale, m, l, o):
    """Attend over one split: tokens begin..end of one sequence, all heads."""
    seq, begin, end = item
    block_size, num_kv_heads, gqa, head_dim, v_head_dim = sizes
    q_rows, q_seq, q_head = q
    k_rows, k_block, k_token, k_head = k_pool
    v_rows, v_block, v_token, v_head = v_pool
    table, table_row = tables
    m[:] = recurrence.NEG_INF
    l[:] = recurrence.ZERO
    o[:] = recurrence.ZERO
    p = np.empty(GROUP, np.float32)
    for group in range(begin, end, GROUP):
        tokens = min(GROUP, end - group)
        for h in range(num_kv_heads * gqa):
            kv = h // gqa
            # load, score
            for t in range(tokens):
                block = np.int64(
                    simd.load_int32(table + seq * table_row + (group + t) // block_size * 4)
                )
                slot = (group + t) % block_size
                row = k_rows + block * k_block + slot * k_token + kv * k_head
                s = recurrence.ZERO
                for d in range(head_dim):
                    s += simd.load_bfloat16(q_rows + seq * q_seq + h * q_head + 2 * d) * (
                        simd.load_bfloat16(row + 2 * d)
                    )
                p[t] = s * scale
            # absorb
            m_new = m[h]
            for t in range(tokens):
                m_new = recurrence.larger(m_new, p[t])
            rescale = recurrence.weight(m[h], m_new)
            l[h] *= rescale
            for t in range(tokens):
                p[t] = recurrence.weight(p[t], m_new)
                l[h] += p[t]
            m[h] = m_new
            # accumulate, store
            for d in range(v_head_dim):
                o[h, d] *= rescale
            for t in range(tokens):
                block = np.int64(
                    simd.load_int32(table + seq * table_row + (group + t) // block_size * 4)
                )
                slot = (group + t) % block_size
                row = v_rows + block * v_block + slot * v_token + kv * v_head
                for d in range(v_head_dim):
                    o[h, d] += p[t] * simd.load_bfloat16(row + 2 * d)


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
                out[seq, h, d] = recurrence.round_to_bfloat16(simd.float_bits(x))
