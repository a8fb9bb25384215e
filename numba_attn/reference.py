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

from typing import Any

import numpy as np
import numpy.typing as npt

Float64Array = npt.NDArray[np.float64]

__all__ = ["AttentionState", "finalize", "merge", "paged_attention", "step_tile"]


class AttentionState:
    """The state ``(m, l, o)`` in float64; see `numba_attn.AttentionState`."""

    def __init__(self, num_seqs: int, num_q_heads: int, head_dim: int) -> None:
        self.m = np.full((num_seqs, num_q_heads), -np.inf)
        self.l = np.zeros((num_seqs, num_q_heads))
        self.o = np.zeros((num_seqs, num_q_heads, head_dim))

    @classmethod
    def like(cls, q: npt.NDArray[Any], v_pool: npt.NDArray[Any]) -> AttentionState:
        """Make a state for q [S, Hq, D] and v_pool [N, B, Hkv, Dv]."""
        return cls(q.shape[0], q.shape[1], v_pool.shape[3])

    def reset(self) -> None:
        """Return to the identity, in place."""
        self.m[:], self.l[:], self.o[:] = -np.inf, 0, 0

    @property
    def lse(self) -> Float64Array:
        """Natural log-sum-exp, [S, Hq]; -inf where empty."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(self.l == 0, -np.inf, self.m + np.log(self.l))


def paged_attention(
    q: npt.NDArray[Any],
    k_pool: npt.NDArray[Any],
    v_pool: npt.NDArray[Any],
    block_tables: Any,
    seq_lens: Any,
    *,
    scale: float | None = None,
    return_lse: bool = False,
    out: npt.NDArray[Any] | None = None,
) -> Any:
    """One-shot dense softmax; see `numba_attn.paged_attention`."""
    if block_tables is None:
        block_tables = np.arange(len(q))[:, None]
    state = AttentionState.like(q, v_pool)
    _absorb(state, q, k_pool, v_pool, block_tables, seq_lens, scale)
    return finalize(state, dtype=q.dtype, return_lse=return_lse, out=out)


def step_tile(
    state: AttentionState,
    q: npt.NDArray[Any],
    k_pool: npt.NDArray[Any],
    v_pool: npt.NDArray[Any],
    tile_blocks: Any,
    tile_block_counts: Any,
    *,
    tile_token_counts: Any = None,
    scale: float | None = None,
) -> None:
    """Absorb one tile; see `numba_attn.step_tile`."""
    if tile_token_counts is None:
        tile_token_counts = np.asarray(tile_block_counts) * k_pool.shape[1]
    part = AttentionState.like(q, v_pool)
    _absorb(part, q, k_pool, v_pool, tile_blocks, tile_token_counts, scale)
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
    dtype: Any = "bfloat16",
    return_lse: bool = False,
    out: npt.NDArray[Any] | None = None,
) -> Any:
    """Normalise into ``o / l``; see `numba_attn.finalize`. `dtype` may be any float type."""
    l = state.l[..., None]
    with np.errstate(invalid="ignore", divide="ignore"):
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


def _bfloat16() -> np.dtype[Any]:
    import ml_dtypes  # slow to import, and not needed by callers with bits

    dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return dtype


def _float64(array: npt.NDArray[Any]) -> Float64Array:
    """Widen bfloat16, or its bits in uint16."""
    bits = array.dtype == np.uint16
    with np.errstate(invalid="ignore"):  # signalling NaN
        return (array.view(_bfloat16()) if bits else array).astype(np.float64)


def _absorb(
    state: AttentionState,
    q: npt.NDArray[Any],
    k_pool: npt.NDArray[Any],
    v_pool: npt.NDArray[Any],
    tables: Any,
    token_counts: Any,
    scale: float | None,
) -> None:
    """Softmax over the first tokens of each row, into an empty state."""
    block_size, num_kv_heads, head_dim = k_pool.shape[1:]
    scale = 1 / np.sqrt(head_dim) if scale is None else scale
    tables, token_counts = np.asarray(tables), np.asarray(token_counts)
    for s, count in enumerate(token_counts.tolist()):
        if count == 0:
            continue
        blocks = tables[s, : -(-count // block_size)]
        k = _float64(k_pool[blocks].reshape(-1, num_kv_heads, head_dim)[:count])
        v = _float64(v_pool[blocks].reshape(-1, num_kv_heads, v_pool.shape[3])[:count])
        for h in range(q.shape[1]):
            kv = h // (q.shape[1] // num_kv_heads)
            with np.errstate(invalid="ignore"):
                logits = scale * (k[:, kv] @ _float64(q[s, h]))  # [tokens]
                # A NaN logit makes the row NaN; a row of -inf logits is empty.
                m = np.max(logits)
                if m == -np.inf:
                    continue
                p = np.exp(logits - m)
                state.m[s, h], state.l[s, h], state.o[s, h] = m, p.sum(), p @ v[:, kv]
