"""User arrays <-> the typed views that kernels take.

Numbers travel as their bits in plain dtypes (bfloat16 as uint16), and only this module knows.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from . import _device
from ._types import Array, HostArray

UINT16 = np.dtype(np.uint16)

CARRIERS: dict[str, np.dtype[Any]] = {
    "bfloat16": UINT16,
    "float16": UINT16,
    "float32": np.dtype(np.float32),
    "float8_e4m3fn": np.dtype(np.uint8),
    "float8_e5m2": np.dtype(np.uint8),
    "int8": np.dtype(np.int8),
}
"""The dtypes of the arrays that kernels see, by number format."""

QUERY_FORMATS = ("bfloat16", "float16", "float32")
POOL_FORMATS = tuple(CARRIERS)

_NUMPY_FORMATS = {
    UINT16: "bfloat16",
    np.dtype(np.float16): "float16",
    np.dtype(np.float32): "float32",
    np.dtype(np.int8): "int8",
}


@functools.cache
def ml_dtype(name: str) -> np.dtype[Any]:
    """Return a dtype of ml_dtypes, which is slow to import: it is on first use."""
    import ml_dtypes

    dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
    return dtype


def dtype_of(name: str) -> np.dtype[Any]:
    """Return the dtype of a number format."""
    return np.dtype(name) if hasattr(np, name) else ml_dtype(name)


@functools.cache
def format_of(dtype: np.dtype[Any]) -> str | None:
    """Return the number format of a dtype; uint16 is taken as bfloat16 bits.

    Examples
    --------
    >>> format_of(np.dtype(np.uint16)), format_of(np.dtype(np.int64))
    ('bfloat16', None)
    """
    if dtype in _NUMPY_FORMATS:
        return _NUMPY_FORMATS[dtype]
    extended = (name for name in CARRIERS if name not in ("float16", "float32", "int8"))
    return next((name for name in extended if dtype == ml_dtype(name)), None)


def carried(name: str, array: Array, formats: tuple[str, ...]) -> tuple[Array, str]:
    """View an array as the carrier of its number format, and name the format; nothing is copied.

    Raises
    ------
    TypeError
        If `array` is no array, or has another format than those given.
    """
    if type(array) is np.ndarray:  # the usual case, told quickly
        view = array
    elif _device.is_device_array(array):
        view = _device.as_device_array(array)
    elif isinstance(array, np.ndarray) and not isinstance(array, np.ma.MaskedArray):
        view = np.asarray(array)
    else:
        raise TypeError(
            f"{name}: expected a NumPy array or a CUDA array, got {type(array).__name__}; "
            "convert it with numpy.asarray"
        )
    found = format_of(view.dtype)
    if found not in formats:
        bits = {"int16": ".view('uint16')", "uint8": ".view(ml_dtypes.float8_e4m3fn)"}
        advice = f"{bits.get(str(view.dtype))} if these are bits"
        if str(view.dtype) not in bits:
            advice = ".astype(ml_dtypes.bfloat16)"
        raise TypeError(
            f"{name}: expected dtype {', '.join(formats)} (or bfloat16 bits as uint16), "
            f"got {view.dtype}; convert it with {advice}"
        )
    return as_carrier(view), found


def as_carrier(array: Array) -> Array:
    """View an array of a known format as its carrier."""
    carrier = CARRIERS[format_of(array.dtype) or ""]
    return array if array.dtype == carrier else array.view(carrier)


def result_dtype(kind: str, dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of a result on a device: there, bfloat16 travels as its bits in uint16."""
    return UINT16 if kind == "cuda" and format_of(dtype) == "bfloat16" else dtype


def floats(name: str, array: Any) -> Array:
    """Return numbers as float32, on the device that they are on; other dtypes are converted.

    Raises
    ------
    TypeError
        If the values are not numbers, or a device array is not float32.
    """
    if _device.is_device_array(array):
        view = _device.as_device_array(array)
        if view.dtype != np.float32:
            raise TypeError(
                f"{name}: a device array must be float32, got {view.dtype}; convert it on the "
                "device"
            )
        return view
    host = _host_numbers(name, array, "floats (float32)")
    if host.dtype.kind not in "iuf" and format_of(host.dtype) is None:
        raise TypeError(
            f"{name}: expected floats (float32), got {host.dtype}; convert it with "
            ".astype('float32')"
        )
    with np.errstate(over="ignore"):
        return host.astype(np.float32, copy=False)


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
    host = _host_numbers(name, array, "integers (int32)")
    if host.size == 0 and not isinstance(array, np.ndarray):
        host = host.astype(np.int32)  # [] has no dtype of its own
    if host.dtype.kind not in "iu":
        raise TypeError(
            f"{name}: expected integers (int32), got {host.dtype}; convert it with .astype('int32')"
        )
    return host


def _host_numbers(name: str, array: Any, expected: str) -> HostArray:
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(f"{name}: expected {expected}, got a masked array; pass array.filled(...)")
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
    if array.dtype == np.int32 and array.flags.c_contiguous:
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
    if isinstance(array, np.ndarray):
        return array
    _device.wait()
    return np.asarray(array.copy_to_host())


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


def view_bytes(
    memory: Array, shape: tuple[int, ...], dtype: Any, offset: int, strides: tuple[int, ...]
) -> Array:
    """View some bytes of a byte array, on the host or a device, as an array of any strides."""
    dtype = np.dtype(dtype)
    if isinstance(memory, np.ndarray):
        return np.ndarray(shape, dtype, memory, offset, strides)
    return at(address(memory) + offset, shape, dtype, strides, owner=memory)


def flatten(array: Array) -> Flat:
    """View a device array of any strides as one run of memory, from its lowest address."""
    from ._plan_cuda import span  # host arrays do without

    size, offset, strides = span(array.shape, array.strides, array.dtype.itemsize)
    first = address(array) - offset * array.dtype.itemsize
    return Flat(at(first, (size,), array.dtype, None, owner=array), offset, strides)


def at(
    pointer: int,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    strides: tuple[int, ...] | None,
    owner: Any,
) -> Array:
    """Make a device array over memory of its owner, which it keeps alive."""
    bits = dtype if dtype.isbuiltin == 1 else np.dtype(f"u{dtype.itemsize}")
    interface = {
        "shape": shape,
        "typestr": bits.str,
        "data": (pointer, False),
        "strides": strides,
        "version": 3,
    }
    if _device.is_simulator():
        memory = SimpleNamespace(__array_interface__=interface, owner=owner)
        array = _device.simulated(np.asarray(memory))
    else:
        memory = SimpleNamespace(__cuda_array_interface__=interface, owner=owner)
        array = _device.cuda().as_cuda_array(memory)
    return array if bits == dtype else array.view(dtype)
