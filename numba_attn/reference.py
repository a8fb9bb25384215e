"""The specification: decode attention in NumPy and float64, as a dense softmax.

The same public functions and arguments as the package, on host arrays, sharing no code with the
kernels. Slow and obvious: this is the oracle that both twins are tested against.

Examples
--------
>>> import ml_dtypes, numpy as np
>>> from numba_attn import reference
>>> rng = np.random.default_rng(0)
>>> q = rng.standard_normal((1, 4, 8)).astype(ml_dtypes.bfloat16)
>>> k_pool, v_pool = rng.standard_normal((2, 3, 16, 2, 8)).astype(ml_dtypes.bfloat16)
>>> out = reference.paged_attention(q, k_pool, v_pool, np.array([[2, 0]]), np.array([20]))
>>> out.shape
(1, 4, 8)
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Float64Array = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

__all__ = ["AttentionState", "append_kv", "finalize", "merge", "paged_attention", "step_tile"]


class AttentionState:
    """The state ``(m, l, o)`` in float64; see `numba_attn.AttentionState`."""

    def __init__(
        self, num_seqs: int, num_q_heads: int, head_dim: int, *, num_queries: int | None = None
    ) -> None:
        rows = num_seqs if num_queries is None else num_queries
        self.m = np.full((rows, num_q_heads), -np.inf)
        self.l = np.zeros((rows, num_q_heads))
        self.o = np.zeros((rows, num_q_heads, head_dim))

    @classmethod
    def like(cls, q: npt.NDArray[Any], v_pool: npt.NDArray[Any]) -> AttentionState:
        """Make a state for q [S, Hq, D], [S, Q, Hq, D] or [tokens, Hq, D] and v_pool."""
        rows = math.prod(q.shape[:-2])
        return cls(q.shape[0], q.shape[-2], v_pool.shape[3], num_queries=rows)

    @classmethod
    def from_partial(
        cls, out: npt.NDArray[Any], lse: npt.NDArray[Any], *, base: str = "e"
    ) -> AttentionState:
        """Make a state of another kernel's result; an lse of -inf or +inf is an empty row."""
        natural = _float64(lse) * np.log({"e": np.e, "2": 2.0}[base])
        natural = natural.reshape(-1, out.shape[-2])
        empty = np.isinf(natural)
        state = cls(len(natural), out.shape[-2], out.shape[-1])
        state.m[:] = np.where(empty, -np.inf, natural)
        state.l[:] = np.where(empty, 0, np.where(np.isnan(natural), np.nan, 1))
        state.o[:] = np.where(empty[..., None], 0, _float64(out).reshape(state.o.shape))
        return state

    def to_partial(self, *, base: str = "e") -> tuple[Float64Array, Float64Array]:
        """Return o / l and the log-sum-exp in a base, both in float64."""
        out, lse = finalize(self, dtype=np.float64, return_lse=True)
        return out, lse / np.log({"e": np.e, "2": 2.0}[base])

    def reset(self) -> None:
        """Return to the identity, in place."""
        self.m[:], self.l[:], self.o[:] = -np.inf, 0, 0

    @property
    def lse(self) -> Float64Array:
        """Natural log-sum-exp, [num_queries, Hq]; -inf where empty."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(self.l == 0, -np.inf, self.m + np.log(self.l))


class _Keys(NamedTuple):
    """The keys of a call, a row for each sequence."""

    tables: npt.NDArray[Any]  # [S, T]
    counts: IntArray  # [S], tokens in the table
    starts: IntArray  # [S], position of the table's first token
    lens: IntArray  # [S], tokens of the whole sequence
    first: IntArray  # [S], the first position attended to


class _Options(NamedTuple):
    """The options that shape logits, mask and values, as the public functions take them."""

    scale: float | None
    softcap: float | None
    sliding_window: int | None
    alibi_slopes: Any
    k_scale: Any
    v_scale: Any
    causal: bool
    query_start_loc: Any


def paged_attention(
    q: npt.NDArray[Any],
    k_pool: npt.NDArray[Any],
    v_pool: npt.NDArray[Any],
    block_tables: Any,
    seq_lens: Any,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    causal: bool = True,
    query_start_loc: Any = None,
    seq_starts: Any = None,
    return_lse: bool = False,
    out: npt.NDArray[Any] | None = None,
    state: AttentionState | None = None,
) -> Any:
    """One-shot dense softmax; see `numba_attn.paged_attention`."""
    lens = _integers(seq_lens)
    tables = np.arange(len(lens))[:, None] if block_tables is None else np.asarray(block_tables)
    zero = np.zeros_like(lens)
    keys = _Keys(tables, lens, zero, lens, _integers(seq_starts, zero))
    options = _Options(
        scale, softcap, sliding_window, alibi_slopes, k_scale, v_scale, causal, query_start_loc
    )
    if state is None:
        state = AttentionState.like(q, v_pool)
    else:
        state.reset()
    _absorb(state, q, k_pool, v_pool, keys, options)
    result, lse = finalize(state, sinks=sinks, dtype=q.dtype, return_lse=True)
    result = result.reshape(*q.shape[:-1], v_pool.shape[3])
    if out is not None:
        out[...] = result
        result = out
    return (result, lse.reshape(q.shape[:-1])) if return_lse else result


def step_tile(
    state: AttentionState,
    q: npt.NDArray[Any],
    k_pool: npt.NDArray[Any],
    v_pool: npt.NDArray[Any],
    tile_blocks: Any,
    tile_block_counts: Any,
    *,
    tile_token_counts: Any = None,
    tile_starts: Any = None,
    seq_lens: Any = None,
    seq_starts: Any = None,
    query_start_loc: Any = None,
    causal: bool = True,
    scale: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    alibi_slopes: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
) -> None:
    """Absorb one tile; see `numba_attn.step_tile`."""
    counts = _integers(tile_token_counts, _integers(tile_block_counts) * k_pool.shape[1])
    zero = np.zeros_like(counts)
    starts = _integers(tile_starts, zero)
    lens = _integers(seq_lens, starts + counts)
    keys = _Keys(np.asarray(tile_blocks), counts, starts, lens, _integers(seq_starts, zero))
    options = _Options(
        scale, softcap, sliding_window, alibi_slopes, k_scale, v_scale, causal, query_start_loc
    )
    part = AttentionState.like(q, v_pool)
    _absorb(part, q, k_pool, v_pool, keys, options)
    merge(state, part)


def merge(state: AttentionState, other: AttentionState) -> None:
    """Merge `other` into `state`; see `numba_attn.merge`."""
    for row in np.ndindex(state.m.shape):
        if other.l[row] == 0 and other.m[row] == -np.inf:
            continue
        if state.l[row] == 0 and state.m[row] == -np.inf:
            state.m[row], state.l[row], state.o[row] = other.m[row], other.l[row], other.o[row]
            continue
        m = max(state.m[row], other.m[row])
        shift = 0.0 if m == -np.inf else m
        with np.errstate(invalid="ignore"):
            a, b = np.exp(state.m[row] - shift), np.exp(other.m[row] - shift)
            state.l[row] = a * state.l[row] + b * other.l[row]
            state.o[row] = a * state.o[row] + b * other.o[row]
        state.m[row] = m


def finalize(
    state: AttentionState,
    *,
    sinks: Any = None,
    dtype: Any = "bfloat16",
    return_lse: bool = False,
    out: npt.NDArray[Any] | None = None,
) -> Any:
    """Normalise into ``o / l``; see `numba_attn.finalize`. `dtype` may be any float type."""
    if sinks is not None:
        state = _with_sinks(state, np.asarray(sinks, np.float64))
    l = state.l[..., None]
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        exact = np.where(l == 0, 0.0, state.o / l)
        if dtype == "bfloat16":
            dtype = _bfloat16()
        if np.dtype(dtype) == np.uint16:
            result = exact.astype(_bfloat16()).view(np.uint16)
        else:
            result = exact.astype(dtype)
    if out is not None:
        out[...] = result
        result = out
    return (result, state.lse) if return_lse else result


def _with_sinks(state: AttentionState, sinks: Float64Array) -> AttentionState:
    """Merge a copy of a state with one more key for each head: its logit the sink, its value 0."""
    total, sink = (AttentionState(*state.o.shape) for _ in range(2))
    sink.m[:], sink.l[:] = sinks, sinks > -np.inf
    merge(total, state)
    merge(total, sink)
    return total


def _bfloat16() -> np.dtype[Any]:
    import ml_dtypes  # slow to import, and not needed by callers with bits

    dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return dtype


def _float64(array: npt.NDArray[Any]) -> Float64Array:
    """Widen bfloat16, or its bits in uint16."""
    bits = array.dtype == np.uint16
    with np.errstate(invalid="ignore"):  # signalling NaN
        return (array.view(_bfloat16()) if bits else array).astype(np.float64)


def _integers(array: Any, default: IntArray | None = None) -> IntArray:
    return default if array is None and default is not None else np.asarray(array, np.int64)


def _queries(q: npt.NDArray[Any], lens: IntArray, query_start_loc: Any) -> list[tuple[int, int]]:
    """List the sequence and the position of each query token: the last one is at the last key."""
    if query_start_loc is None:
        counts = np.full(len(lens), q.shape[1] if q.ndim == 4 else 1)
    else:
        counts = np.diff(_integers(query_start_loc))
    query = [(s, i - count) for s, count in enumerate(counts.tolist()) for i in range(count)]
    return [(s, int(lens[s]) + back) for s, back in query]


def _attended(keys: _Keys, s: int, position: int, options: _Options) -> IntArray:
    """List the tokens of the table, counted from its first, that a query attends to."""
    start, token = keys.starts[s], np.arange(keys.counts[s], dtype=np.int64)
    first, end = keys.first[s], keys.lens[s]
    if options.sliding_window is not None:
        first = max(first, position - options.sliding_window + 1)
    if options.causal:
        end = min(end, position + 1)
    attended: IntArray = token[(start + token >= first) & (start + token < end)]
    return attended


def _rows(pool: npt.NDArray[Any], where: tuple[Any, Any], scale: Any) -> Float64Array:
    """Gather rows [tokens, Hkv, D] of a pool and multiply them by their scales."""
    rows = _float64(pool[where])
    if scale is None:
        return rows
    scales = np.asarray(scale, np.float64)
    with np.errstate(invalid="ignore"):
        return rows * (scales[where] if scales.ndim == 3 else scales)[..., None]


def _logits(
    q: Float64Array, k: Float64Array, distance: IntArray, slope: float, options: _Options
) -> Float64Array:
    """Score one query [D] against keys [tokens, D] at so many positions from it [tokens]."""
    logits = (1 / np.sqrt(len(q)) if options.scale is None else options.scale) * (k @ q)
    if options.softcap is not None:
        logits = options.softcap * np.tanh(logits / options.softcap)
    return logits + slope * distance


def _absorb(
    state: AttentionState,
    q: npt.NDArray[Any],
    k_pool: npt.NDArray[Any],
    v_pool: npt.NDArray[Any],
    keys: _Keys,
    options: _Options,
) -> None:
    """Softmax over the keys that each query attends to, into an empty state."""
    queries = _float64(q).reshape(-1, *q.shape[-2:])  # [rows, Hq, D]
    num_q_heads = q.shape[-2]
    slopes = np.zeros(num_q_heads) if options.alibi_slopes is None else options.alibi_slopes
    for row, (s, position) in enumerate(_queries(q, keys.lens, options.query_start_loc)):
        token = _attended(keys, s, position, options)
        if len(token) == 0:
            continue
        where = keys.tables[s, token // k_pool.shape[1]], token % k_pool.shape[1]
        k = _rows(k_pool, where, options.k_scale)
        v = _rows(v_pool, where, options.v_scale)
        distance = keys.starts[s] + token - position
        for h in range(num_q_heads):
            kv = h // (num_q_heads // k_pool.shape[2])
            with np.errstate(invalid="ignore"):
                logits = _logits(queries[row, h], k[:, kv], distance, float(slopes[h]), options)
                # A NaN logit makes the row NaN; a row of -inf logits is empty.
                m = np.max(logits)
                if m == -np.inf:
                    continue
                p = np.exp(logits - m)
                state.m[row, h], state.l[row, h], state.o[row, h] = m, p.sum(), p @ v[:, kv]


def append_kv(
    k: npt.NDArray[Any],
    v: npt.NDArray[Any] | None,
    k_pool: npt.NDArray[Any],
    v_pool: npt.NDArray[Any] | None,
    slot_mapping: Any,
    *,
    k_scale: Any = None,
    v_scale: Any = None,
    compute_scales: bool = False,
) -> None:
    """Write tokens into the pools, in float32 as the package; see `numba_attn.append_kv`."""
    for tokens, pool, scale in ((k, k_pool, k_scale), (v, v_pool, v_scale)):
        if tokens is None or pool is None:
            continue
        for row, slot in zip(tokens, slot_mapping, strict=True):
            if slot == -1:
                continue
            where = divmod(int(slot), pool.shape[1])
            if scale is None:
                pool[where] = row if row.dtype == pool.dtype else _stored(row, pool.dtype)
                continue
            if compute_scales:
                scale[where] = _token_scale(row, pool.dtype)
            factor = np.asarray(scale, np.float32)
            factor = factor[where] if factor.ndim == 3 else factor
            with np.errstate(over="ignore", invalid="ignore"):
                scaled = _float64(row).astype(np.float32) / factor[..., None]
            pool[where] = _stored(scaled, pool.dtype)


def _most(dtype: np.dtype[Any]) -> float:
    """Return the largest number of a dtype of 8 bits; of the others, inf."""
    return {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}.get(dtype.name, np.inf)


def _token_scale(row: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[np.float32]:
    """Return the scale of each head of a row [Hkv, D]: a normal, finite float32."""
    limits = np.finfo(np.float32)
    largest = np.nan_to_num(np.abs(_float64(row)), posinf=float(limits.max)).max(-1)
    scale = largest.astype(np.float32) / np.float32(_most(dtype))
    return np.where(largest == 0, np.float32(1), np.maximum(scale, limits.tiny))


def _stored(x: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Round to nearest even into a dtype; those of 8 bits saturate."""
    x = _float64(x)
    with np.errstate(over="ignore", invalid="ignore"):
        if dtype == np.uint16:
            return x.astype(_bfloat16()).view(np.uint16)
        if dtype == np.int8:
            return np.rint(np.clip(np.nan_to_num(x), -128, 127)).astype(dtype)
        return np.clip(x, -_most(dtype), _most(dtype)).astype(dtype)
