"""The recurrence in float32 NumPy, right or with a fault planted: the suite's own test subject."""

from typing import NamedTuple

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
    "window one key short",
    "window one key long",
    "window of every query alike",
    "causal mask dropped",
    "causal one key short",
    "seq_starts ignored",
    "positions from the start",
    "sink dropped",
    "sink in every step",
    "sink with the value of a key",
    "softcap dropped",
    "softcap before the scale",
    "softcap of masked logits",
    "ALiBi's sign",
    "ALiBi from the last key",
    "ALiBi's slopes of kv heads",
    "k_scale dropped",
    "k_scale after the softcap",
    "v_scale dropped",
    "v_scale in l",
    "scales of one head",
)


class State:
    def __init__(self, num_seqs, num_q_heads, head_dim):
        self.m = np.full((num_seqs, num_q_heads), -np.inf, np.float32)
        self.l = np.zeros((num_seqs, num_q_heads), np.float32)
        self.o = np.zeros((num_seqs, num_q_heads, head_dim), np.float32)
        self.steps = 0

    @classmethod
    def like(cls, q, v_pool):
        return cls(int(np.prod(q.shape[:-2])), q.shape[-2], v_pool.shape[3])

    @property
    def lse(self):
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(self.l == 0, np.float32(-np.inf), self.m + np.log(self.l))


class Where(NamedTuple):
    """A query token and the tokens of its tile that it attends to, by their positions."""

    s: int
    position: int
    start: int  # position of the tile's first token
    begin: int
    end: int


class NumpyTwin:
    """A module in all but name, as `_backends.Backend` takes it."""

    AttentionState = State

    def __init__(self, fault=None):
        assert fault is None or fault in FAULTS
        self.fault = fault

    def paged_attention(
        self, q, k_pool, v_pool, tables, lens, *, sinks=None, return_lse=False, **options
    ):
        state = State.like(q, v_pool)
        counts = -(-lens // k_pool.shape[1])
        self.step_tile(state, q, k_pool, v_pool, tables, counts, tile_token_counts=lens, **options)
        out, lse = self.finalize(state, sinks=sinks, dtype=q.dtype, return_lse=True)
        answer = out.reshape(*q.shape[:-1], -1), lse.reshape(q.shape[:-1])
        return answer if return_lse else answer[0]

    def step_tile(
        self,
        state,
        q,
        k_pool,
        v_pool,
        blocks,
        counts,
        *,
        tile_token_counts,
        k_scale=None,
        v_scale=None,
        **options,
    ):
        queries = q.reshape(-1, *q.shape[-2:]).astype(np.float32)
        scale = options.pop("scale", None)
        options["scale"] = np.float32(1 / np.sqrt(q.shape[-1]) if scale is None else scale)
        part = State.like(q, v_pool)
        if self.fault == "finite sentinel":
            part.m[:] = -1000
        per_seq = tile_token_counts, options.pop("tile_starts", None), options.pop("seq_lens", None)
        for row, where in enumerate(self._rows(q, *per_seq, options)):
            token = np.arange(where.begin, where.end) - where.start
            if len(token) == 0:
                continue
            if self.fault == "token dropped":
                token = np.delete(token, len(token) // 2)
            if self.fault == "softcap of masked logits" and "softcap" in options:
                token = np.arange(counts[where.s] * k_pool.shape[1])
            block = blocks[where.s, token // k_pool.shape[1]]  # a kernel would read anything there
            at = np.clip(block, 0, len(k_pool) - 1), token % k_pool.shape[1]
            k, v = k_pool[at].astype(np.float32), v_pool[at].astype(np.float32)
            scales = [self._scales(x, at, k.shape[:2]) for x in (k_scale, v_scale)]
            if self.fault == "padded tail counted":
                k, v = (np.pad(x, ((0, -len(x) % GROUP), (0, 0), (0, 0))) for x in (k, v))
            self._absorb(part, row, queries[row], k, v, *scales, where, token, options)
        self.merge(state, part)
        state.steps += 1

    def _rows(self, q, tokens, starts, lens, options):
        """List where each query token stands."""
        starts = np.zeros_like(tokens) if starts is None else starts
        lens = starts + tokens if lens is None else lens
        firsts = options.pop("seq_starts", None)
        firsts = np.zeros_like(tokens) if firsts is None else firsts
        query_start_loc = options.pop("query_start_loc", None)
        window, causal = options.pop("sliding_window", None), options.pop("causal", True)
        if query_start_loc is None:
            counts = [q.shape[1] if q.ndim == 4 else 1] * len(tokens)
        else:
            counts = np.diff(query_start_loc)
        for s, count in enumerate(counts):
            for i in range(count):
                position = int(lens[s]) - count + i
                begin, end = int(firsts[s]), int(lens[s])
                if self.fault == "seq_starts ignored":
                    begin = 0
                if window is not None:
                    own = int(lens[s]) - 1 if "every query alike" in str(self.fault) else position
                    short = {"window one key short": 1, "window one key long": -1}
                    begin = max(begin, own - window + 1 + short.get(self.fault, 0))
                if causal and self.fault != "causal mask dropped":
                    end = min(end, position + (self.fault != "causal one key short"))
                begin = max(begin, int(starts[s]))
                if self.fault == "positions from the start":
                    position -= int(firsts[s])
                if self.fault == "ALiBi from the last key":
                    position = int(lens[s]) - 1
                end = min(end, int(starts[s] + tokens[s]))
                yield Where(s, position, int(starts[s]), begin, max(begin, end))

    def _scales(self, scale, at, shape):
        """Return float32 [tokens, Hkv]."""
        if scale is None:
            return np.ones(shape, np.float32)
        scale = np.asarray(scale, np.float32)
        scale = np.broadcast_to(scale[at] if scale.ndim == 3 else scale, shape)
        return scale[:, [0] * shape[1]] if self.fault == "scales of one head" else scale

    def _absorb(self, part, row, q, k, v, k_scale, v_scale, where, token, options):
        num_q_heads, num_kv_heads = len(q), k.shape[1]
        distance = where.start + token - where.position
        if self.fault == "k_scale dropped":
            k_scale = np.ones_like(k_scale)
        if self.fault == "v_scale dropped":
            v_scale = np.ones_like(v_scale)
        if self.fault == "ALiBi's sign":
            distance = -distance
        for h in range(num_q_heads):
            gqa = num_q_heads // num_kv_heads
            kv = h % num_kv_heads if self.fault == "wrong kv head" else h // gqa
            with np.errstate(invalid="ignore", over="ignore"):
                s = k[:, kv] @ q[h]
                n = len(token)
                s[:n] = self._logits(s[:n], k_scale[:, kv], distance, h, gqa, options)
                values = v[:, kv].copy()
                values[:n] *= v_scale[:, kv, None]
                in_l = np.ones_like(s)
                if self.fault == "v_scale in l":
                    in_l[:n] = v_scale[:, kv]
                for first in range(0, len(s), GROUP):
                    group = slice(first, first + GROUP)
                    self._absorb_group(part, (row, h), s[group], values[group], in_l[group])

    def _logits(self, s, k_scale, distance, h, gqa, options):
        """Scale, cap and bias."""
        cap, slopes = options.get("softcap"), options.get("alibi_slopes")
        late = self.fault in ("softcap before the scale", "k_scale after the softcap")
        if self.fault != "softcap before the scale":
            s = s * options["scale"]
        if not late:
            s = s * k_scale
        if cap is not None and self.fault != "softcap dropped":
            s = np.float32(cap) * np.tanh(s / np.float32(cap))
        if self.fault == "softcap before the scale":
            s = s * options["scale"]
        if late:
            s = s * k_scale
        if slopes is not None:
            slope = slopes[h // gqa if "of kv heads" in str(self.fault) else h]
            s = s + np.float32(slope) * distance.astype(np.float32)
        return s

    def _absorb_group(self, part, row, s, v, in_l):
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
        l = part.l[row] * (1 if self.fault == "l not rescaled" else rescale)
        part.l[row] = l + (p * in_l).sum()
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

    def finalize(self, state, *, sinks=None, dtype=ml_dtypes.bfloat16, return_lse=False):
        if sinks is not None and self.fault != "sink dropped":
            state = self._with_sinks(state, sinks)
        with np.errstate(invalid="ignore", divide="ignore"):
            l = state.l[..., None]
            exact = np.where(l == 0, 0, state.o / l)
            if np.dtype(dtype) == np.uint16:
                out = exact.astype(ml_dtypes.bfloat16).view(dtype)
            else:
                out = exact.astype(dtype)
        lse = state.lse * np.float32(np.log2(np.e)) if self.fault == "base-2 lse" else state.lse
        return (out, lse) if return_lse else out

    def _with_sinks(self, state, sinks):
        total, sink = (State(*state.o.shape) for _ in range(2))
        self.merge(total, state)
        sink.m[:], sink.l[:] = sinks, np.asarray(sinks) > -np.inf
        if self.fault == "sink with the value of a key":
            sink.o[:] = 1
        for _ in range(state.steps if self.fault == "sink in every step" else 1):
            self.merge(total, sink)
        return total
