"""Compile a model's kernels ahead of time."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import _arrays, _validate, _validate_state
from .api import step_tile
from .append import append_kv
from .folding import finalize
from .state import AttentionState


def warmup(
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    v_head_dim: int | None = None,
    dtype: Any = "bfloat16",
    kv_dtype: Any = None,
    softcap: bool = False,
    alibi: bool = False,
    token_scales: bool = False,
    device: str = "cpu",
) -> None:
    """Compile, or load from the cache, what a model's shape needs, so that no later call waits.

    One attention kernel is compiled per (Hq / Hkv, D, Dv, dtypes, softcap, ALiBi, scales by token)
    and a few for all; they stay on disk. Batch, queries per sequence, lengths, windows, sinks,
    block size and strides are run-time values: nothing compiles while a sequence grows.

    Parameters
    ----------
    num_q_heads, num_kv_heads, head_dim : int
        Hq, Hkv and D.
    v_head_dim : int, optional
        Dv, by default D.
    dtype, kv_dtype : dtype
        Of q and of the pools; by default that of q.
    softcap, alibi, token_scales : bool
        Whether the calls will pass `softcap`, `alibi_slopes`, scales [N, B, Hkv].
    device : {"cpu", "cuda"}
        Where the calls will run.

    Raises
    ------
    ValueError, TypeError
        If a size is no integer or below 1, Hq is no multiple of Hkv, or a dtype is not supported.
    RuntimeError
        If the device is not available.

    Examples
    --------
    >>> import numba_attn
    >>> numba_attn.warmup(num_q_heads=8, num_kv_heads=2, head_dim=64)
    """
    num_q_heads, num_kv_heads, head_dim, v_head_dim = _validate_state.positive_sizes(
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        v_head_dim=head_dim if v_head_dim is None else v_head_dim,
    )
    _validate.head_ratio("num_q_heads", num_q_heads, num_kv_heads)
    dtype = _validate.known_dtype("dtype", dtype, _arrays.QUERY_FORMATS)
    if kv_dtype is not None:
        kv_dtype = _validate.known_dtype("kv_dtype", kv_dtype, _arrays.POOL_FORMATS)
    for name, value in {"softcap": softcap, "alibi": alibi, "token_scales": token_scales}.items():
        _validate.flag(name, value)
    state = AttentionState(1, num_q_heads, v_head_dim, device=device)
    pool = np.zeros((1, 16, num_kv_heads, max(head_dim, v_head_dim)), kv_dtype or dtype)
    scales = np.ones(pool.shape[:3], np.float32) if token_scales else None
    step_tile(
        state,
        np.zeros((1, num_q_heads, head_dim), dtype),
        pool[..., :head_dim],
        pool[..., :v_head_dim],
        [[0]],
        [1],
        tile_starts=[0],
        seq_lens=[16],
        softcap=1.0 if softcap else None,
        alibi_slopes=np.zeros(num_q_heads) if alibi else None,
        k_scale=scales,
    )
    finalize(state, dtype=dtype)
    if device == "cpu":
        row = np.zeros((1, num_kv_heads, head_dim), dtype)
        append_kv(row, None, pool[..., :head_dim], None, [0])
