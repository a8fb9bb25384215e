"""The torch operator for caches that are no pages: `torch.compile` keeps it in its graph."""

from __future__ import annotations

import torch

from .. import paged_attention

_library = torch.library.Library("numba_attn", "FRAGMENT")
_library.define(
    "dense_attention(Tensor q, Tensor key, Tensor value, Tensor? intervals, *, float? scale=None, "
    "float? softcap=None, int? sliding_window=None, Tensor? sinks=None) -> Tensor"
)


@torch.library.impl(_library, "dense_attention", "CompositeExplicitAutograd")
def _dense_attention(
    q: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    intervals: torch.Tensor | None,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    if intervals is None:
        starts, ends = None, key.new_full(key.shape[:1], key.shape[2], dtype=torch.int32)
    else:
        starts, ends = intervals[:, 0, 0, 0], intervals[:, 0, 0, 1]
    out: torch.Tensor = paged_attention(
        q,
        key.transpose(1, 2),  # [S, L, Hkv, D]: a pool with a block for each sequence
        value.transpose(1, 2),
        None,
        ends,
        seq_starts=starts,
        scale=scale,
        softcap=softcap,
        sliding_window=sliding_window,
        sinks=sinks,
    )
    return out


@torch.library.register_fake("numba_attn::dense_attention", lib=_library)
def _shape(
    q: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: object, **options: object
) -> torch.Tensor:
    return q.new_empty((*q.shape[:-1], value.shape[-1]))


def dense_attention(
    q: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    intervals: torch.Tensor | None,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend over caches that are no pages, with the last query at a row's last key.

    Parameters
    ----------
    q : [S, Hq, D] or [S, Q, Hq, D]
    key, value : [S, Hkv, L, D], [S, Hkv, L, Dv]
    intervals : int32 [S, 1, 1, 2], optional
        First key, and the one after the last; by default all of them.
    scale, softcap, sliding_window, sinks : optional
        As in `numba_attn.paged_attention`; the window ends with the interval.

    Returns
    -------
    out : [S, Hq, Dv] or [S, Q, Hq, Dv]
    """
    out: torch.Tensor = torch.ops.numba_attn.dense_attention(
        q.detach(),
        key.detach(),
        value.detach(),
        intervals,
        scale=scale,
        softcap=softcap,
        sliding_window=sliding_window,
        sinks=None if sinks is None else sinks.detach(),
    )
    return out
