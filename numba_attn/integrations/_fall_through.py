"""What is no decode step: transformers' own attention functions, without losing an option."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

Attended = tuple[torch.Tensor, torch.Tensor | None]


def fall_through(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    options: dict[str, Any],
) -> Attended:
    """Run SDPA where it takes all options, else the model's own eager function.

    Parameters
    ----------
    module : torch.nn.Module
        The attention layer.
    query : [S, Hq, Q, D]
    key, value : [S, Hkv, L, D], [S, Hkv, L, Dv]
    mask : bool or floating point [S, 1, Q, L], optional
    options : dict
        Keyword arguments that are not None; softcap and sinks among them are dropped by SDPA.
    """
    if not {"softcap", "s_aux", "sinks", "output_attentions"} & set(options):
        given = {name: value for name, value in options.items() if name != "sliding_window"}
        attended: Attended = sdpa_attention_forward(module, query, key, value, mask, **given)
        return attended
    if mask is None and is_causal(module, options):
        mask = _causal(query, key)
    if mask is not None and mask.dtype == torch.bool:
        least = torch.finfo(query.dtype).min
        mask = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill(
            ~mask, least
        )
    return _eager(module)(module, query, key, value, mask, **options)


def is_causal(module: torch.nn.Module, options: dict[str, Any]) -> bool:
    """Tell whether a layer's queries attend to no later key, where no mask says so."""
    return bool(options.get("is_causal", getattr(module, "is_causal", True)))


def _causal(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    """Return the mask that SDPA means by ``is_causal``: the queries stand at the first keys."""
    q_length, kv_length = query.shape[2], key.shape[2]
    if q_length == 1:  # the last one: it attends to all keys
        return None
    return torch.ones(1, 1, q_length, kv_length, dtype=torch.bool, device=key.device).tril()


def _eager(module: torch.nn.Module) -> Callable[..., Attended]:
    """Find the eager function of the model that a layer is of."""
    for cls in type(module).__mro__:
        found = getattr(sys.modules.get(cls.__module__), "eager_attention_forward", None)
        if found is not None:
            function: Callable[..., Attended] = found
            return function
    raise ValueError(
        f"numba_attn: {type(module).__name__} passes softcap or sinks, which SDPA ignores, and its "
        "module has no eager_attention_forward; use attn_implementation='eager'"
    )
