"""What the CPU twin's kernels are told beside the work: addresses, scales, options in use."""

import functools
from typing import NamedTuple

import numpy as np

from . import logits
from ._formats import FORMATS, number

_ONE = np.ones(1, np.float32)  # kernels read it by address: it must outlive every call


def locate(array):
    """Return (address, byte strides of all axes but the last)."""
    return (array.__array_interface__["data"][0], *array.strides[:-1])


def _locate_all(array):
    """Return (address, byte strides of all axes)."""
    return (array.__array_interface__["data"][0], *array.strides)


def options_used(options):
    """Return which options of `logits.absorb` a call uses, as bits."""
    used = logits.CAPPED * (options.softcap > 0) + logits.SCALED * options.token_scales()
    return used + logits.BIASED * (options.alibi_slopes is not None)


class Scaling(NamedTuple):
    """What scales and shapes logits and values."""

    heads: np.ndarray  # float32 [Hkv, 2], of a product q . k, of a partial o
    k_tokens: tuple[int, ...]  # address and strides of float32 [N, B, Hkv], or zeros
    v_tokens: tuple[int, ...]
    softcap: float
    slopes: np.ndarray  # float32 [Hkv, lanes], by lane of m; [Hkv, 0] without


def scaling_of(options, formats, gqa, shape):
    """Prepare the scaling of a call over pools of shape [N, B, Hkv]."""
    num_kv_heads = shape[2]
    if options.k_scale is options.v_scale is options.alibi_slopes is None:
        return _same_for_all(options.scale, options.softcap, formats, num_kv_heads)
    by_token = options.token_scales()
    heads, tokens = np.empty((num_kv_heads, 2), np.float32), []
    for which, (scale, common) in enumerate(
        zip((options.k_scale, options.v_scale), _common(options.scale, formats), strict=True)
    ):
        scale = _ONE if scale is None else scale
        heads[:, which] = common if by_token else scale * common
        every = np.broadcast_to(scale, shape) if by_token else None
        tokens.append(_locate_all(every) if by_token else (0, 0, 0, 0))
    slopes = np.empty((num_kv_heads, 0), np.float32)
    if options.alibi_slopes is not None:
        by_head = options.alibi_slopes.reshape(num_kv_heads, gqa)
        slopes = np.ascontiguousarray(by_head[:, logits.head_of_lanes(gqa)])
    return Scaling(heads, *tokens, options.softcap, slopes)


def _common(scale, formats):
    """Return the factors of all keys and of all values."""
    return scale * FORMATS[number(formats.k)].factor, FORMATS[number(formats.v)].factor


@functools.lru_cache(maxsize=16)
def _same_for_all(scale, softcap, formats, num_kv_heads):
    """Return the scaling where all tokens and heads have the same."""
    heads = np.full((num_kv_heads, 2), _common(scale, formats), np.float32)
    zeros = (0, 0, 0, 0)
    return Scaling(heads, zeros, zeros, softcap, np.empty((num_kv_heads, 0), np.float32))
