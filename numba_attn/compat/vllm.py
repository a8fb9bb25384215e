"""vLLM's merge of two partial results."""

from __future__ import annotations

import numpy as np

from .. import _device, _frameworks, _validate
from .._types import Array
from ..folding import finalize, merge
from ..state import AttentionState
from . import _common


def merge_attn_states(
    output: Array,
    prefix_output: Array,
    prefix_lse: Array,
    suffix_output: Array,
    suffix_lse: Array,
    output_lse: Array | None = None,
    prefill_tokens_with_context: int | None = None,
    output_scale: None = None,
) -> None:
    """Merge attention over a prefix and over a suffix into `output`: vLLM's signature.

    Parameters
    ----------
    output : [num_tokens, num_heads, head_dim]
        Written; bfloat16, float16 or float32.
    prefix_output, suffix_output : [num_tokens, num_heads, head_dim]
        Normalised outputs.
    prefix_lse, suffix_lse : float32 [num_heads, num_tokens]
        Log-sum-exps of the logits, natural; -inf or +inf where there was no key.
    output_lse : float32 [num_heads, num_tokens], optional
        Written: that of all logits.
    prefill_tokens_with_context : int, optional
        Tokens that have a prefix, the first ones; the others get the suffix. By default all.
    output_scale : None
        Not taken: it is for an output in float8.

    Raises
    ------
    ValueError, TypeError
        For other shapes and dtypes; nothing has been written then.

    Examples
    --------
    >>> import numpy as np
    >>> from numba_attn.compat import merge_attn_states
    >>> a, lse = np.ones((3, 8, 64), np.float16), np.zeros((8, 3), np.float32)
    >>> output, output_lse = np.empty_like(a), np.empty_like(lse)
    >>> merge_attn_states(output, a, lse, -a, lse + np.float32(np.log(3)), output_lse)
    >>> float(output[0, 0, 0]), round(float(output_lse[0, 0]), 4)
    (-0.5, 1.3863)
    """
    _common.refuse("output_scale", output_scale, "no output is quantised", "quantise it afterwards")
    _validate.axes("output", output, "[num_tokens, num_heads, head_dim]", 3)
    with_prefix = num_tokens = output.shape[0]
    if prefill_tokens_with_context is not None:
        name, advice = "prefill_tokens_with_context", "None stands for all tokens"
        with_prefix = _common.whole(name, prefill_tokens_with_context, 0, num_tokens, advice)
    if output_lse is not None:
        _check_lse(output_lse, output)
    prefix = _side("prefix", prefix_output, prefix_lse, output)
    suffix = _side("suffix", suffix_output, suffix_lse, output)
    parts: list[tuple[slice, tuple[_Side, ...]]] = [(slice(with_prefix), (prefix, suffix))]
    if with_prefix < num_tokens:
        parts.append((slice(with_prefix, None), (suffix,)))
    merged = [(tokens, _merged(sides, tokens)) for tokens, sides in parts]
    for tokens, state in merged:
        finalized = _common.naming(out="output")
        _, lse = finalized(finalize, state, dtype=output.dtype, out=output[tokens], return_lse=True)
        if output_lse is not None:
            output_lse[:, tokens] = lse.swapaxes(0, 1)


_Side = tuple[str, Array, Array]  # its name, out [num_tokens, num_heads, head_dim], lse transposed


@_frameworks.taking_arrays("output_lse", writes=("output_lse",))
def _check_lse(output_lse: Array, output: Array) -> None:
    """Check what log-sum-exps are written to."""
    _validate.axes("output_lse", output_lse, "[num_heads, num_tokens]", 2)
    num_tokens, num_heads, _ = output.shape
    if tuple(output_lse.shape) != (num_heads, num_tokens):
        raise ValueError(
            f"output_lse: expected shape [num_heads, num_tokens] = {(num_heads, num_tokens)}, got "
            f"{tuple(output_lse.shape)}; transpose it"
        )
    if output_lse.dtype != np.float32:
        raise TypeError(f"output_lse: expected float32, got {output_lse.dtype}; allocate it so")
    if not _device.is_device_array(output_lse):
        _validate.writable_apart("output_lse", output_lse, {"output": output})


def _side(name: str, out: Array, lse: Array, output: Array) -> _Side:
    """Check one of the two partial results."""
    _validate.axes(f"{name}_output", out, "[num_tokens, num_heads, head_dim]", 3)
    _validate.axes(f"{name}_lse", lse, "[num_heads, num_tokens]", 2)
    if tuple(out.shape) != tuple(output.shape):
        raise ValueError(
            f"{name}_output: expected the shape of output, {tuple(output.shape)}, got "
            f"{tuple(out.shape)}; pass one row for each token and head"
        )
    if tuple(lse.shape) != (output.shape[1], output.shape[0]):
        raise ValueError(
            f"{name}_lse: expected shape [num_heads, num_tokens] = "
            f"{(output.shape[1], output.shape[0])}, got {tuple(lse.shape)}; transpose it"
        )
    return name, out, lse.swapaxes(0, 1)


def _merged(sides: tuple[_Side, ...], tokens: slice) -> AttentionState:
    """Merge what some tokens have of one side, or of both."""
    states: list[AttentionState] = [
        _common.naming(out=f"{name}_output", lse=f"{name}_lse")(
            AttentionState.from_partial, out[tokens], lse[tokens]
        )
        for name, out, lse in sides
    ]
    for other in states[1:]:
        merge(states[0], other)
    return states[0]
