"""Torch tensors as the arrays that numba_attn takes, and back; nothing is copied."""

from __future__ import annotations

from typing import Any

import torch

import numba_attn


def paged_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    block_tables: torch.Tensor | None,
    seq_lens: torch.Tensor,
    *,
    sinks: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """Call `numba_attn.paged_attention` with tensors on the CPU."""
    given = {name: _array(value) for name, value in options.items()}
    if sinks is not None:
        given["sinks"] = _array(sinks.float())
    arrays = (_array(x) for x in (q, k_pool, v_pool, block_tables, seq_lens))
    out = torch.from_numpy(numba_attn.paged_attention(*arrays, **given))
    return out.view(q.dtype) if q.dtype == torch.bfloat16 else out


def _array(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach()
    bits = value.view(torch.uint16) if value.dtype == torch.bfloat16 else value
    return bits.numpy()
