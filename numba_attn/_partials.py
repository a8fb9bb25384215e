"""Partial results ``(out, lse)`` of attention kernels <-> the arrays of a state."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from . import _arrays, _device, _validate
from ._types import Array, FloatArray, HostArray

_LOG_OF_BASE = {"e": 1.0, "2": math.log(2.0)}


class Parts(NamedTuple):
    """The arrays of a state, on the host."""

    m: FloatArray  # [queries, Hq]
    l: FloatArray  # [queries, Hq]
    o: FloatArray  # [queries, Hq, Dv]


def log_of(base: Any) -> float:
    """Return the natural logarithm of the base of a log-sum-exp."""
    if not isinstance(base, str) or base not in _LOG_OF_BASE:
        raise ValueError(
            f"base: expected 'e' (FlashAttention) or '2' (FlashInfer), got {base!r}; pass the base "
            "of the lse's logarithm"
        )
    return _LOG_OF_BASE[base]


def to_parts(out: Array, lse: Array, base: Any) -> Parts:
    """Check a partial result; return the state whose o / l and log-sum-exp it is.

    Where the natural logarithm has no float32, l is not 1 but makes up for the difference; up to a
    factor e: beyond 2^24 float32 does not tell logits apart, and -1e30 is some kernels' -inf.
    """
    log = log_of(base)
    values, sums = _host_floats("out", out), _host_floats("lse", lse)
    _validate.axes("out", values, "[queries, Hq, Dv] or [S, Q, Hq, Dv]", 3, 4)
    if sums.shape != values.shape[:-1]:
        raise ValueError(
            f"lse: expected shape {values.shape[:-1]}, that of out without Dv, got {sums.shape}; "
            "transpose FlashAttention's [S, Hq, Q] to [S, Q, Hq]"
        )
    num_q_heads, head_dim = values.shape[-2:]
    exact = sums.reshape(-1, num_q_heads).astype(np.float64) * log
    with np.errstate(over="ignore", invalid="ignore"):
        m = exact.astype(np.float32)
        empty = np.isinf(m)
        l = np.where(empty, 0.0, np.exp(np.clip(exact - m, -1, 1))).astype(np.float32)
        o = values.reshape(*m.shape, head_dim).astype(np.float64) * l[..., None]
        o[empty] = 0.0
        m[empty] = -np.inf
        return Parts(m, l, o.astype(np.float32))


def _host_floats(name: str, array: Array) -> HostArray:
    """Return floats of any dtype on the host."""
    if _device.is_device_array(array):
        array = _arrays.to_host(_device.as_device_array(array))
    if not isinstance(array, np.ndarray) or isinstance(array, np.ma.MaskedArray):
        raise TypeError(
            f"{name}: expected a NumPy array or a CUDA array, got {type(array).__name__}; convert "
            "it with numpy.asarray"
        )
    if array.dtype == _arrays.UINT16:
        return array.view(_arrays.ml_dtype("bfloat16"))
    if array.dtype.kind != "f" and _arrays.format_of(array.dtype) != "bfloat16":
        raise TypeError(
            f"{name}: expected floats (bfloat16, float16, float32 or float64), got {array.dtype}; "
            "convert it with .astype('float32')"
        )
    return array


def in_base(lse: HostArray, base: str) -> HostArray:
    """Return a natural log-sum-exp in another base."""
    return np.asarray(lse / np.float64(log_of(base)), np.float32)
