"""The recurrence in float32 NumPy, right or with a fault planted: the suite's own test subject."""

import ml_dtypes
import numpy as np

GROUP = 16
FAULTS = (
    "mean of V",
    "token dropped",
    "wrong kv head",
    "stale max",
    "max of the first group kept",
    "l not rescaled",
    "o not rescaled",
    "padded tail counted",
    "base-2 lse",
    "finite sentinel",
    "partials in bfloat16",
    "NaN hidden",
)


class State:
    def __init__(self, num_seqs, num_q_heads, head_dim):
        self.m = np.full((num_seqs, num_q_heads), -np.inf, np.float32)
        self.l = np.zeros((num_seqs, num_q_heads), np.float32)
        self.o = np.zeros((num_seqs, num_q_heads, head_dim), np.float32)

    @classmethod
    def like(cls, q, v_pool):
        return cls(q.shape[0], q.shape[1], v_pool.shape[3])

    @property
    def lse(self):
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(self.l == 0, np.float32(-np.inf), self.m + np.log(self.l))


class NumpyTwin:
    """A module in all but name, as `_backends.Backend` takes it."""

    AttentionState = State

    def __init__(self, fault=None):
        assert fault is None or fault in FAULTS
        self.fault = fault

    def paged_attention(self, q, k_pool, v_pool, tables, lens, *, scale=None, return_lse=False):
        state = State.like(q, v_pool)
        counts = -(-lens // k_pool.shape[1])
        self.step_tile(
            state, q, k_pool, v_pool, tables, counts, tile_token_counts=lens, scale=scale
        )
        return self.finalize(state, return_lse=return_lse)

    def step_tile(self, state, q, k_pool, v_pool, blocks, counts, *, tile_token_counts, scale=None):
        scale = np.float32(1 / np.sqrt(q.shape[2]) if scale is None else scale)
        part = State.like(q, v_pool)
        if self.fault == "finite sentinel":
            part.m[:] = -1000
        for s, tokens in enumerate(tile_token_counts):
            if tokens == 0:
                continue
            k, v = (pool[blocks[s, : counts[s]]] for pool in (k_pool, v_pool))
            k, v = (x.reshape(-1, *x.shape[2:])[:tokens].astype(np.float32) for x in (k, v))
            if self.fault == "token dropped":
                k, v = np.delete(k, tokens // 2, axis=0), np.delete(v, tokens // 2, axis=0)
            if self.fault == "padded tail counted":
                padding = ((0, counts[s] * k_pool.shape[1] - tokens), (0, 0), (0, 0))
                k, v = np.pad(k, padding), np.pad(v, padding)
            for h in range(q.shape[1]):
                self._absorb_row(part, (s, h), q[s, h].astype(np.float32), k, v, scale)
        self.merge(state, part)

    def _absorb_row(self, part, row, q, k, v, scale):
        h, num_kv_heads = row[1], k.shape[1]
        gqa = part.m.shape[1] // num_kv_heads
        kv = h % num_kv_heads if self.fault == "wrong kv head" else h // gqa
        for first in range(0, len(k), GROUP):
            group = slice(first, first + GROUP)
            with np.errstate(invalid="ignore", over="ignore"):
                self._absorb_group(part, row, scale * (k[group, kv] @ q), v[group, kv])

    def _absorb_group(self, part, row, s, v):
        if self.fault == "mean of V":
            s = np.zeros_like(s)
        if self.fault == "NaN hidden":
            s = np.nan_to_num(s, nan=-np.inf, neginf=-np.inf)
        m_old = part.m[row]
        m = np.fmax(m_old, np.fmax.reduce(s))
        if self.fault == "max of the first group kept" and m_old != -np.inf:
            m = m_old
        shift = 0 if m == -np.inf else m
        rescale = np.exp(m_old - shift)
        if self.fault == "stale max":
            shift = 0 if m_old == -np.inf else m_old
        p = np.exp(s - shift)
        part.m[row] = m
        part.l[row] = part.l[row] * (1 if self.fault == "l not rescaled" else rescale) + p.sum()
        part.o[row] = part.o[row] * (1 if self.fault == "o not rescaled" else rescale) + p @ v

    def merge(self, state, other):
        for row in np.ndindex(state.m.shape):
            a, b = (x.m[row] == -np.inf and x.l[row] == 0 for x in (state, other))
            if b:
                continue
            if a:
                state.m[row], state.l[row], state.o[row] = other.m[row], other.l[row], other.o[row]
            else:
                self._merge_row(state, other, row)
        if self.fault == "partials in bfloat16":
            state.o[:] = state.o.astype(ml_dtypes.bfloat16)

    def _merge_row(self, state, other, row):
        m = np.fmax(state.m[row], other.m[row])
        shift = 0 if m == -np.inf else m
        a, b = np.exp(state.m[row] - shift), np.exp(other.m[row] - shift)
        state.l[row] = a * state.l[row] + b * other.l[row]
        state.o[row] = a * state.o[row] + b * other.o[row]
        state.m[row] = m

    def finalize(self, state, *, dtype=ml_dtypes.bfloat16, return_lse=False):
        with np.errstate(invalid="ignore", divide="ignore"):
            l = state.l[..., None]
            out = np.where(l == 0, 0, state.o / l).astype(ml_dtypes.bfloat16).view(dtype)
        lse = state.lse * np.float32(np.log2(np.e)) if self.fault == "base-2 lse" else state.lse
        return (out, lse) if return_lse else out
