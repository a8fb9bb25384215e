"""vLLM's merge of two partial results."""

from __future__ import annotations

from .. import _validate
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
    shape = tuple(output.shape)
    _validate.axes("output", output, "[num_tokens, num_heads, head_dim]", 3)
    if output_lse is not None and tuple(output_lse.shape) != (shape[1], shape[0]):
        raise ValueError(
            f"output_lse: expected shape [num_heads, num_tokens] = {(shape[1], shape[0])}, got "
            f"{tuple(output_lse.shape)}"
        )
    states = []
    for side, out, lse in (
        ("prefix", prefix_output, prefix_lse),
        ("suffix", suffix_output, suffix_lse),
    ):
        _validate.axes(f"{side}_lse", lse, "[num_heads, num_tokens]", 2)
        if tuple(out.shape) != shape:
            raise ValueError(
                f"{side}_output: expected the shape of output, {shape}, got {tuple(out.shape)}"
            )
        call = _common.naming(out=f"{side}_output", lse=f"{side}_lse")
        states.append(call(AttentionState.from_partial, out, lse.swapaxes(0, 1)))
    merge(*states)
    call = _common.naming(out="output")
    _, lse = call(finalize, states[0], dtype=output.dtype, out=output, return_lse=True)
    if output_lse is not None:
        output_lse[...] = lse.swapaxes(0, 1)
