"""Tensors of torch <-> NumPy arrays and Numba's device arrays, without a copy."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

import numpy as np
import torch

from . import _arrays, _device
from ._types import Array

_DTYPES = {
    getattr(torch, name): _arrays.dtype_of(name)
    for name in (*_arrays.CARRIERS, "uint16", "int16", "int32", "int64")
    if hasattr(torch, name)
}
_CARRIERS = {1: torch.uint8, 2: torch.int16}  # of what NumPy has from ml_dtypes, by item size
_BFLOAT16 = _arrays.ml_dtype("bfloat16")
_INT16 = np.dtype(np.int16)

_FIRST_BYTE = 4096
_MEMORY: Any = (ctypes.c_char * (1 << 62)).from_address(_FIRST_BYTE)
"""All of this process's memory: an array over it costs half of what `Tensor.numpy` does."""


def taken(name: str, tensor: torch.Tensor, written: bool, kept: bool = False) -> Any:
    """View a tensor as an array; one without axes is a number.

    Unless it is to be `kept`, the array is valid only as long as the tensor.

    Raises
    ------
    TypeError
        If it is one that autograd follows, or is not in plain memory.
    RuntimeError
        If it is on a device other than the CPU or a CUDA device.
    """
    dtype = _DTYPES.get(tensor.dtype)
    if tensor.requires_grad and torch.is_grad_enabled():
        raise _refusal(name, tensor, "")
    try:
        if (
            type(tensor) is torch.Tensor
            and dtype is not None
            and tensor.is_cpu
            and not (kept or tensor.is_neg())
        ):
            offset = (tensor.data_ptr() or _FIRST_BYTE) - _FIRST_BYTE
            if tensor.is_contiguous():
                array = np.ndarray(tensor.shape, dtype, _MEMORY, offset)
            else:
                strides = [step * dtype.itemsize for step in tensor.stride()]
                array = np.ndarray(tensor.shape, dtype, _MEMORY, offset, strides)
            return array if array.shape else array[()]
        return _on_device(tensor) if tensor.is_cuda else _owning(tensor, dtype)
    except (RuntimeError, TypeError) as error:
        raise _refusal(name, tensor, str(error)) from error


def _owning(tensor: torch.Tensor, dtype: np.dtype[Any] | None) -> Any:
    """Return an array that keeps the memory of a tensor, or a number."""
    if tensor.dim() == 0:
        return tensor.item()
    if dtype is not None and dtype.isbuiltin != 1:
        return tensor.detach().view(_CARRIERS[dtype.itemsize]).numpy().view(dtype)
    return tensor.detach().numpy()


def _on_device(tensor: torch.Tensor) -> Any:
    if tensor.dim() == 0:
        return tensor.item()
    dtype = _DTYPES.get(tensor.dtype) or np.dtype(str(tensor.dtype).removeprefix("torch."))
    dtype = _arrays.result_dtype("cuda", dtype)
    strides = tuple(step * dtype.itemsize for step in tensor.stride())
    with _device.on_gpu(tensor.get_device()):
        return _arrays.at(tensor.data_ptr(), tuple(tensor.shape), dtype, strides, owner=tensor)


def _refusal(name: str, tensor: torch.Tensor, said: str) -> Exception:
    """Say why a tensor is no view of plain memory."""
    if tensor.requires_grad and torch.is_grad_enabled():
        return TypeError(
            f"{name}: expected a tensor that autograd does not follow, got one with "
            "requires_grad=True; call under torch.no_grad(), or pass its .detach()"
        )
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
    elif "ScalarType" in said or "data type" in said:
        found, advice = f"dtype {tensor.dtype}", "convert it with .to(torch.bfloat16)"
    return TypeError(
        f"{name}: expected a strided tensor of real numbers, got "
        f"{found or type(tensor).__name__ + ', of which torch says: ' + said}; {advice}"
    )


def given(array: Array, like: Any) -> torch.Tensor:
    """Return a result as a tensor of the same memory."""
    if isinstance(array, np.ndarray):
        if array.dtype == _BFLOAT16:
            return torch.from_numpy(array.view(_INT16)).view(torch.bfloat16)
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
