"""User arrays <-> the typed views that kernels take.

bfloat16 travels as its bits in uint16, and only this module knows: kernels see uint16.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from . import _device, _plan
from ._types import Array, HostArray

UINT16 = np.dtype(np.uint16)


@functools.cache
def bfloat16() -> np.dtype[Any]:
    """Return the dtype; ml_dtypes is slow to import, so it is on first use."""
    import ml_dtypes

    dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return dtype


def bits(name: str, array: Array) -> Array:
    """View a bfloat16 array (or bfloat16 bits in uint16) as uint16; nothing is copied.

    Raises
    ------
    TypeError
        If `array` is no array, or has another dtype.
    """
    if _device.is_device_array(array):
        view = _device.as_device_array(array)
        if view.dtype != UINT16:
            raise TypeError(
                f"{name}: a device array carries bfloat16 as its bits in uint16, got {view.dtype}; "
                "view it as uint16"
            )
        return view
    if not isinstance(array, np.ndarray) or isinstance(array, np.ma.MaskedArray):
        raise TypeError(
            f"{name}: expected a NumPy array or a CUDA array, got {type(array).__name__}; "
            "convert it with numpy.asarray"
        )
    if array.dtype == UINT16:
        return np.asarray(array)
    if array.dtype == bfloat16():
        return np.asarray(array).view(UINT16)
    may_be_bits = array.dtype.kind in "iu" and array.dtype.itemsize == UINT16.itemsize
    advice = ".astype('uint16') if these are bits" if may_be_bits else ".astype(ml_dtypes.bfloat16)"
    raise TypeError(
        f"{name}: expected dtype bfloat16 (or its bits as uint16), got {array.dtype}; "
        f"convert it with {advice}"
    )


def integers(name: str, array: Any) -> Array:
    """Return host integers as an array of their own dtype, device integers as int32.

    Raises
    ------
    TypeError
        If the values are not integers, or a device array is not int32.
    """
    if _device.is_device_array(array):
        view = _device.as_device_array(array)
        if view.dtype != np.int32:
            raise TypeError(
                f"{name}: a device array must be int32, got {view.dtype}; convert it on the device"
            )
        return view
    host = _host_numbers(name, array)
    if host.size == 0 and not isinstance(array, np.ndarray):
        host = host.astype(np.int32)  # [] has no dtype of its own
    if host.dtype.kind not in "iu":
        raise TypeError(
            f"{name}: expected integers (int32), got {host.dtype}; convert it with .astype('int32')"
        )
    return host


def _host_numbers(name: str, array: Any) -> HostArray:
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(
            f"{name}: expected integers (int32), got a masked array; pass array.filled(...)"
        )
    try:
        return np.asarray(array)
    except ValueError as error:
        raise ValueError(
            f"{name}: expected rows of one length, got a ragged {type(array).__name__}; pad its "
            "rows (entries past a length are never read)"
        ) from error


def as_int32(array: Array) -> Array:
    """Return C-ordered int32; entries outside its range (unused ones: they are unread) wrap."""
    if not isinstance(array, np.ndarray):
        return array
    return np.ascontiguousarray(array).astype(np.int32, copy=False)


def times(counts: Array, factor: int) -> Array:
    """Return counts * factor as int32, on the device of the counts."""
    if isinstance(counts, np.ndarray):
        return (counts.astype(np.int64) * factor).astype(np.int32)
    return _device.backend("cuda").times(counts, factor)


def empty(kind: str, shape: tuple[int, ...], dtype: Any) -> Array:
    """Allocate an array on a device."""
    return np.empty(shape, dtype) if kind == "cpu" else _device.cuda().device_array(shape, dtype)


def to_host(array: Array) -> HostArray:
    """Copy a device array to the host; a host array is returned as it is."""
    return array if isinstance(array, np.ndarray) else np.asarray(array.copy_to_host())


def bring(kind: str, array: Array) -> Array:
    """Return the array on a device; copies where it is elsewhere."""
    if kind == "cpu":
        return to_host(array)
    if not isinstance(array, np.ndarray):
        return array
    return _device.cuda().to_device(np.ascontiguousarray(array))


def overwrite(target: Array, source: Array) -> None:
    """Copy `source` into `target`, wherever the two are."""
    if isinstance(target, np.ndarray):
        target[...] = to_host(source)
    elif target.is_c_contiguous():
        target.copy_to_device(source)
    else:
        target[:] = source


class Flat(NamedTuple):
    """A device array as the 1-D run of memory it lies in, so that kernels see one type."""

    memory: Array
    offset: int  # of its first element
    strides: tuple[int, ...]  # in elements


def address(array: Array) -> int:
    """Return where a device array's first element is."""
    if _device.is_simulator():
        return int(array.__array_interface__["data"][0])
    return array.device_ctypes_pointer.value or 0


def flatten(array: Array) -> Flat:
    """View a device array of any strides as one run of memory, from its lowest address."""
    size, offset, strides = _plan.span(array.shape, array.strides, array.dtype.itemsize)
    first = address(array) - offset * array.dtype.itemsize
    interface = {"shape": (size,), "typestr": array.dtype.str, "data": (first, False), "version": 3}
    if _device.is_simulator():
        memory = SimpleNamespace(__array_interface__=interface, owner=array)
        return Flat(type(array)(np.asarray(memory)), offset, strides)
    memory = SimpleNamespace(__cuda_array_interface__=interface, owner=array)
    return Flat(_device.cuda().as_cuda_array(memory), offset, strides)
