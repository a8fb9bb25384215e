"""Hugging Face transformers: ``attn_implementation="numba_attn"``.

A decode step, one query token per sequence, reads the model's own K/V cache in place. What this
package does not take runs in transformers' own functions.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from . import _continuous_batching
from ._dense_op import dense_attention
from ._fall_through import Attended, fall_through, is_causal
from ._interval_mask import as_bool, interval_mask, is_interval_mask

NAME = "numba_attn"

HARMLESS = frozenset(
    {
        "deterministic",  # of FlashAttention's backward pass
        "logits_to_keep",
        "mm_token_type_ids",  # in the mask
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",  # in q and k
        "return_dict",
        "token_type_ids",  # in the mask
        "use_cache",
    }
)
"""Keywords that layers pass on, and that change no attention."""

OPTIONS = frozenset(
    {
        "dropout",
        "is_causal",
        "output_attentions",
        "position_bias",
        "s_aux",
        "scaling",
        "sinks",
        "sliding_window",
        "softcap",
    }
)
"""Keywords that change the result, and that this function or one it falls through to takes."""

DTYPES = torch.float32, torch.bfloat16, torch.float16


def register() -> None:
    """Make ``attn_implementation="numba_attn"`` known to Hugging Face transformers.

    Decode steps, one query token per sequence, run `numba_attn.paged_attention` over the tensors of
    the model's K/V cache, of any kind that transformers has, in place; so do prompts of models with
    softcap or sinks, where nothing is masked. Everything else falls through to transformers' SDPA
    function, or where there is softcap or sinks, which that ignores, to the model's own eager
    function. ``model.generate_batch`` (continuous batching) reads its paged cache by block tables.
    A mask function of the same name gives each row's interval of keys.

    The first step compiles a kernel, or loads it; `numba_attn.warmup` does so ahead of time.
    A second call changes nothing.

    Raises
    ------
    ValueError
        Not here, but by a model's layer, if it passes a keyword that is not known: it might change
        the result.

    References
    ----------
    https://huggingface.co/docs/transformers/attention_interface

    Examples
    --------
    >>> import torch, transformers
    >>> import numba_attn.integrations.transformers
    >>> numba_attn.integrations.transformers.register()
    >>> config = transformers.LlamaConfig(
    ...     vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1,
    ...     num_attention_heads=2, num_key_value_heads=1, eos_token_id=None, pad_token_id=0)
    >>> model = transformers.AutoModelForCausalLM.from_config(
    ...     config, attn_implementation="numba_attn")
    >>> model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=5, do_sample=False).shape
    torch.Size([1, 8])
    """
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, interval_mask)
    _continuous_batching.allow(NAME)


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **keywords: Any,
) -> Attended:
    """Attend as transformers' attention functions do.

    Parameters
    ----------
    module : torch.nn.Module
        The attention layer.
    query : [S, Hq, Q, D]
    key, value : [S, Hkv, L, D], [S, Hkv, L, Dv]
    attention_mask : int32 [S, 1, 1, 2], or bool or floating point [S, 1, Q, L], optional
        Intervals as of `interval_mask`, or a mask as SDPA takes it.
    **keywords
        What the layer passes; None is as good as absent.

    Returns
    -------
    out : [S, Q, Hq, Dv]
    weights : None, or those of the eager function
    """
    given = {name: value for name, value in keywords.items() if value is not None}
    if _continuous_batching.is_batch(given):
        batch = _continuous_batching.take(given)
        options = _known(given)
        return _continuous_batching.attend(query, key, value, batch, options), None
    options = _known(given)
    if _takes_all(query, key, value, options):
        if query.shape[2] == 1 and (attention_mask is None or is_interval_mask(attention_mask)):
            return _dense(module, query, key, value, attention_mask, options), None
        if attention_mask is None and _is_for_us(module, query, options):
            keys, values = (x[:, :, : query.shape[2]] for x in (key, value))  # as SDPA: the first
            return _dense(module, query, keys, values, None, options), None
    if is_interval_mask(attention_mask):
        assert attention_mask is not None
        attention_mask = as_bool(attention_mask, key.shape[2])
    return fall_through(module, query, key, value, attention_mask, options)


def _known(keywords: dict[str, Any]) -> dict[str, Any]:
    """Return the keywords that change the result; raise where one is not known."""
    unknown = set(keywords) - HARMLESS - OPTIONS
    if unknown:
        raise ValueError(
            f"{NAME}: {', '.join(sorted(unknown))}: expected keywords that are known to change "
            "nothing, or that are taken, got others, which may change the result; drop them, or "
            "use attn_implementation='eager'"
        )
    options = {name: value for name, value in keywords.items() if name in OPTIONS}
    if not options.get("output_attentions"):
        options.pop("output_attentions", None)
    return options


def _takes_all(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: dict[str, Any]
) -> bool:
    """Tell whether all that is asked, but for the mask, is something that we have."""
    tensors = (query, key, value)
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    return (
        query.shape[0] == key.shape[0]
        and not {"position_bias", "sinks", "output_attentions"} & set(options)
        and not options.get("dropout")
        and not needs_grad
        and all(x.dtype in DTYPES for x in tensors)
    )


def _is_for_us(module: torch.nn.Module, query: torch.Tensor, options: dict[str, Any]) -> bool:
    """Tell whether a prompt without a mask has what SDPA would ignore."""
    window = options.get("sliding_window")
    ignored = {"softcap", "s_aux"} & set(options) or (window and window < query.shape[2])
    return bool(ignored) and is_causal(module, options)


def _dense(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    intervals: torch.Tensor | None,
    options: dict[str, Any],
) -> torch.Tensor:
    """Attend over a dense cache: [S, Q, Hq, Dv]."""
    # Where there is a mask, the window is in it.
    windowed = intervals is None and is_causal(module, options)
    return dense_attention(
        query.transpose(1, 2),
        key,
        value,
        intervals,
        scale=options.get("scaling"),
        softcap=options.get("softcap"),
        sliding_window=options.get("sliding_window") if windowed else None,
        sinks=options.get("s_aux"),
    )
