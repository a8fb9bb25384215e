"""The mask function for transformers: one query token attends to an interval of its row's keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.masking_utils import causal_mask_function, sdpa_mask
from transformers.utils.import_utils import is_tracing


def interval_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor | None:
    """Return the intervals of a decode step, int32 [S, 1, 1, 2], or what SDPA takes.

    A row's interval is its first key and the one after its last, as places in the cache. None:
    nothing is masked. A mask of several query tokens, and one with a hole, is that of SDPA.
    """
    decode = q_length == 1
    plain = mask_function is causal_mask_function and attention_mask is None
    if decode and plain and isinstance(q_offset, torch.Tensor) and is_tracing(q_offset):
        end = (q_offset + 1 - kv_offset).to(torch.int32)  # nothing to read: it stays in the graph
        return torch.stack((torch.zeros_like(end), end)).expand(batch_size, 1, 1, 2)
    mask: torch.Tensor | None = sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        **options,
    )
    if mask is None or not decode or is_tracing(mask):
        return mask
    found = intervals(mask)
    return mask if found is None else found


def intervals(mask: torch.Tensor) -> torch.Tensor | None:
    """Return the interval of each row of a mask bool [S, 1, 1, L], or None where one has a hole."""
    if mask.shape[1] != 1:
        return None
    counts = mask.sum(-1, dtype=torch.int32)
    starts = mask.to(torch.uint8).argmax(-1)  # the first key; 0 in an empty row
    ends = (starts + counts).to(torch.int32)
    places = torch.arange(mask.shape[-1], device=mask.device)
    if (mask & (places >= ends[..., None])).any():
        return None
    return torch.stack((starts.to(torch.int32), ends), -1)


def is_interval_mask(mask: torch.Tensor | None) -> bool:
    """Tell whether a mask is one of intervals; other masks are of bool or floating point."""
    return mask is not None and mask.dtype == torch.int32 and tuple(mask.shape[1:]) == (1, 1, 2)


def as_bool(intervals: torch.Tensor, kv_length: int) -> torch.Tensor:
    """Return intervals [S, 1, 1, 2] as the mask bool [S, 1, 1, kv_length] of SDPA."""
    places = torch.arange(kv_length, device=intervals.device, dtype=torch.int32)
    return (places >= intervals[..., :1]) & (places < intervals[..., 1:])
