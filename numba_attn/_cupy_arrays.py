"""CuPy arrays <-> Numba's device arrays, without a copy."""

from __future__ import annotations

import contextlib
from typing import Any

import cupy
import numpy as np

from . import _arrays, _device
from ._types import Array


def taken(name: str, array: Any, written: bool, kept: bool = False) -> Any:
    """View an array; one without axes is a number."""
    if array.ndim == 0:
        return array.item()
    dtype = _arrays.result_dtype("cuda", np.dtype(array.dtype))
    with _device.on_gpu(array.device.id):
        return _arrays.at(array.data.ptr, array.shape, dtype, array.strides, owner=array)


def given(array: Array, like: Any) -> Any:
    """Return a result as an array of the same memory; one on the host as a copy."""
    found = cupy.asarray(array)
    dtype = getattr(like, "dtype", found.dtype)
    bits = found.dtype == np.uint16 and _arrays.format_of(np.dtype(dtype)) == "bfloat16"
    return found.view(dtype) if bits else found


def launching(value: Any) -> contextlib.AbstractContextManager[Any] | None:
    """Let calls run where CuPy would run: on the array's device, on the current stream."""
    device: Any = getattr(value, "device", "cuda")  # an array's, or the name that a state has
    if device == "cpu":
        return None
    number = cupy.cuda.runtime.getDevice() if device == "cuda" else device.id
    return _device.launching_at(number, cupy.cuda.get_current_stream().ptr)
