"""Tensors of torch <-> NumPy arrays and Numba's device arrays, without a copy."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import torch

from . import _arrays, _device
from ._types import Array

_BITS = {1: torch.uint8, 2: torch.int16}  # by item size; torch has uint16 from 2.3 on
_EXTENDED = {
    getattr(torch, name): _arrays.ml_dtype(name)
    for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2")
    if hasattr(torch, name)
}
"""The dtypes that NumPy has from ml_dtypes."""


def taken(name: str, tensor: torch.Tensor, written: bool) -> Any:
    """View a tensor as an array; one without axes is a number.

    Raises
    ------
    TypeError
        If it is one that autograd follows, or is not in plain memory.
    RuntimeError
        If it is on a device other than the CPU or a CUDA device.
    """
    if tensor.requires_grad and torch.is_grad_enabled():
        raise TypeError(
            f"{name}: expected a tensor that autograd does not follow, got one with "
            "requires_grad=True; call under torch.no_grad(), or pass its .detach()"
        )
    try:
        if tensor.is_cuda:
            return _on_device(tensor)
        extended = _EXTENDED.get(tensor.dtype)
        if tensor.dim() == 0:
            return tensor.item()
        if extended is not None:
            return tensor.view(_BITS[extended.itemsize]).numpy().view(extended)
        return (tensor.detach() if tensor.requires_grad else tensor).numpy()
    except (RuntimeError, TypeError) as error:
        raise _refusal(name, tensor, error) from error


def _on_device(tensor: torch.Tensor) -> Any:
    if tensor.dim() == 0:
        return tensor.item()
    dtype = _EXTENDED.get(tensor.dtype)
    if dtype is None:
        dtype = np.dtype(str(tensor.dtype).removeprefix("torch."))
    dtype = _arrays.result_dtype("cuda", dtype)
    strides = tuple(step * dtype.itemsize for step in tensor.stride())
    return _arrays.at(tensor.data_ptr(), tuple(tensor.shape), dtype, strides, owner=tensor)


def _refusal(name: str, tensor: torch.Tensor, error: Exception) -> Exception:
    """Say why a tensor is no view of plain memory."""
    device = tensor.device.type
    if device not in ("cpu", "cuda", "meta"):
        return RuntimeError(
            f"{name}: expected a tensor on the CPU or a CUDA device, got one on {device!r}; move "
            "it with .cpu()"
        )
    found, advice = "", "pass a plain tensor of its values"
    if device == "meta":
        found, advice = "one on the meta device, which has no values", "materialise it"
    elif tensor.is_nested:
        found, advice = "a nested one", "pad it: what is past a length is not read"
    elif tensor.layout is not torch.strided:
        found, advice = f"one of layout {tensor.layout}", "make it dense with .to_dense()"
    elif tensor.is_quantized:
        found, advice = "a quantized one", "pass .int_repr(), and its scale as k_scale or v_scale"
    elif tensor.is_conj() or tensor.is_neg():
        found, advice = "a lazily conjugated or negated one", "pass .resolve_conj().resolve_neg()"
    elif "ScalarType" in str(error) or "data type" in str(error):
        found, advice = f"dtype {tensor.dtype}", "convert it with .to(torch.bfloat16)"
    return TypeError(
        f"{name}: expected a strided tensor of real numbers, got "
        f"{found or type(tensor).__name__ + ', of which torch says: ' + str(error)}; {advice}"
    )


def given(array: Array, like: Any) -> torch.Tensor:
    """Return a result as a tensor of the same memory."""
    if isinstance(array, np.ndarray):
        if array.dtype.name == "bfloat16":
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)
    if array.dtype != np.uint16:
        return tensor_at(array)
    were_bits = str(getattr(like, "dtype", "")) == "torch.uint16"
    return tensor_at(array.view(np.int16)).view(torch.uint16 if were_bits else torch.bfloat16)


def tensor_at(array: Array) -> torch.Tensor:
    """View a device array of a dtype that torch and Numba both have as a tensor."""
    return torch.as_tensor(array)


def launching(value: Any) -> contextlib.AbstractContextManager[Any] | None:
    """Let calls run where torch would run: on the tensor's device, on the current stream there."""
    tensor = value if isinstance(value, torch.Tensor) else None
    if not (tensor.is_cuda if tensor is not None else value.device == "cuda"):
        return None
    stream = torch.cuda.current_stream(None if tensor is None else tensor.device)
    return _device.launching_at(stream.device.index, stream.cuda_stream)
