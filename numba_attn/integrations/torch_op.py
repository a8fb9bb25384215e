"""Attention as operators of torch, so that `torch.compile` keeps it in its graph.

To import this module is enough: inside a compiled function, `numba_attn.paged_attention` and
`numba_attn.append_kv` are then the operators ``torch.ops.numba_attn.paged_attention`` and
``torch.ops.numba_attn.append_kv``. Outside, nothing changes.
"""

from __future__ import annotations

from typing import Any

import torch

import numba_attn

_LIBRARY = torch.library.Library("numba_attn", "FRAGMENT")

_LIBRARY.define(
    "paged_attention(Tensor q, Tensor k_pool, Tensor v_pool, Tensor? block_tables, "
    "Tensor seq_lens, *, float? scale=None, float? softcap=None, int? sliding_window=None, "
    "Tensor? alibi_slopes=None, Tensor? sinks=None, Tensor? k_scale=None, Tensor? v_scale=None, "
    "bool causal=True, Tensor? query_start_loc=None, Tensor? seq_starts=None) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_LIBRARY.define(
    "append_kv(Tensor k, Tensor? v, Tensor(a!) k_pool, Tensor(b!)? v_pool, Tensor slot_mapping, *, "
    "Tensor(c!)? k_scale=None, Tensor(d!)? v_scale=None, bool compute_scales=False) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _attend(*args: Any, **options: Any) -> Any:
    return numba_attn.paged_attention(*args, **options, return_lse=True)


def _attend_fake(q: Any, k_pool: Any, v_pool: Any, *args: Any, **options: Any) -> Any:
    out = q.new_empty((*q.shape[:-1], v_pool.shape[-1]))
    return out, q.new_empty(q.shape[:-1], dtype=torch.float32)


def _append(*args: Any, **options: Any) -> None:
    numba_attn.append_kv(*args, **options)


def _append_fake(*args: Any, **options: Any) -> None:
    return None


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("paged_attention", _attend, _key)
    _LIBRARY.impl("append_kv", _append, _key)
torch.library.register_fake("numba_attn::paged_attention", _attend_fake, lib=_LIBRARY)
torch.library.register_fake("numba_attn::append_kv", _append_fake, lib=_LIBRARY)


def _tensor(value: Any) -> torch.Tensor | None:
    """Return an option of numbers as a tensor, as an operator takes it."""
    if value is None or isinstance(value, torch.Tensor):
        return value
    return torch.tensor(value, dtype=torch.float32)


def paged_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    block_tables: torch.Tensor | None,
    seq_lens: torch.Tensor,
    *,
    k_scale: Any = None,
    v_scale: Any = None,
    return_lse: bool = False,
    **options: Any,
) -> Any:
    """Attend as `numba_attn.paged_attention` does, by the operator.

    Parameters
    ----------
    q, k_pool, v_pool : tensors
        As in `numba_attn.paged_attention`.
    block_tables, seq_lens : int tensors
        As there; the graph does not depend on their values.
    k_scale, v_scale : float or tensor, optional
        As there.
    return_lse : bool
        Return also the log-sum-exp.
    **options
        `scale`, `softcap`, `sliding_window`, `alibi_slopes`, `sinks`, `causal`, `query_start_loc`,
        `seq_starts` as there, arrays as tensors. There is no `out`, `state`, `stream`, `kernel` or
        `device`.

    Returns
    -------
    out : tensor [S, Hq, Dv], [S, Q, Hq, Dv] or [tokens, Hq, Dv]
    lse : float32 tensor [S, Hq], [S, Q, Hq] or [tokens, Hq]
        Only with ``return_lse``.

    Examples
    --------
    >>> import torch
    >>> from numba_attn.integrations import torch_op
    >>> q, pool = torch.ones(1, 4, 16), torch.ones(3, 8, 2, 16)
    >>> tables, lens = torch.tensor([[2, 0]]), torch.tensor([11])
    >>> step = torch.compile(torch_op.paged_attention, fullgraph=True, backend="aot_eager")
    >>> step(q, pool, pool, tables, lens).shape
    torch.Size([1, 4, 16])
    """
    out, lse = torch.ops.numba_attn.paged_attention(
        q,
        k_pool,
        v_pool,
        block_tables,
        seq_lens,
        k_scale=_tensor(k_scale),
        v_scale=_tensor(v_scale),
        **options,
    )
    return (out, lse) if return_lse else out


def append_kv(
    k: torch.Tensor,
    v: torch.Tensor | None,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor | None,
    slot_mapping: torch.Tensor,
    *,
    k_scale: Any = None,
    v_scale: Any = None,
    compute_scales: bool = False,
) -> None:
    """Write new tokens into the pools as `numba_attn.append_kv` does, by the operator.

    Parameters
    ----------
    k, v, k_pool, v_pool, slot_mapping : tensors
        As in `numba_attn.append_kv`; the pools are modified.
    k_scale, v_scale, compute_scales : optional
        As there.

    Examples
    --------
    >>> import torch
    >>> from numba_attn.integrations import torch_op
    >>> k, pool = torch.ones(1, 2, 16), torch.zeros(3, 8, 2, 16)
    >>> torch_op.append_kv(k, None, pool, None, torch.tensor([5]))
    >>> float(pool[0, 5].min()), float(pool.sum())
    (1.0, 32.0)
    """
    scales = {"k_scale": _tensor(k_scale), "v_scale": _tensor(v_scale)}
    torch.ops.numba_attn.append_kv(
        k, v, k_pool, v_pool, slot_mapping, **scales, compute_scales=compute_scales
    )


# What torch.compile traces in place of the public functions, whose own code is not traced.
for _function, _operator in (
    (numba_attn.paged_attention, paged_attention),
    (numba_attn.append_kv, append_kv),
):
    torch.compiler.substitute_in_graph(_function, skip_signature_check=True)(_operator)
