"""Arrays of JAX <-> NumPy arrays and Numba's device arrays; what goes in is not copied."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from . import _arrays, _device
from ._types import Array


def taken(name: str, array: Any, written: bool, kept: bool = False) -> Any:
    """View an array, read-only; one without axes is a number.

    Raises
    ------
    TypeError
        If it has no values yet (in `jax.jit`), or is to be written.
    RuntimeError
        If it is on more than one device, or on one that is neither a CPU nor a CUDA device.
    """
    if isinstance(array, jax.core.Tracer):
        raise TypeError(
            f"{name}: expected an array with values, got a JAX tracer (of jit, grad or vmap); call "
            "it outside, or through jax.pure_callback"
        )
    if written:
        raise TypeError(
            f"{name}: is written to, and a JAX array is read-only; pass a NumPy array, and make a "
            "JAX array of it after the call"
        )
    devices = array.devices()
    device = next(iter(devices))
    if len(devices) > 1 or device.platform not in ("cpu", "gpu", "cuda"):
        raise RuntimeError(
            f"{name}: expected an array on one CPU or CUDA device, got one on "
            f"{', '.join(sorted(map(str, devices)))}; move it with jax.device_put"
        )
    if array.ndim == 0:
        return array.item()
    if device.platform == "cpu":
        return np.asarray(array)
    dtype = _arrays.result_dtype("cuda", np.dtype(array.dtype))
    pointer = array.block_until_ready().unsafe_buffer_pointer()
    with _device.on_gpu(device.local_hardware_id):
        return _arrays.at(pointer, array.shape, dtype, None, owner=array)


def given(array: Array, like: Any) -> Any:
    """Return a result as an array on the device of another one."""
    if isinstance(array, np.ndarray):
        device = next(iter(like.devices())) if isinstance(like, jax.Array) else None
        return jax.device_put(array, device)
    _device.cuda().synchronize()  # JAX launches on streams of its own
    found = jax.numpy.asarray(array)
    return found.view(jax.numpy.bfloat16) if array.dtype == np.uint16 else found


def launching(value: Any) -> contextlib.AbstractContextManager[Any] | None:
    """Let calls run on an array's GPU, and wait for them."""
    if not isinstance(value, jax.Array):
        return _waited(None) if value.device == "cuda" else None
    if isinstance(value, jax.core.Tracer):
        return None
    device = next(iter(value.devices()))
    return None if device.platform == "cpu" else _waited(device.local_hardware_id)


@contextlib.contextmanager
def _waited(number: int | None) -> Iterator[None]:
    """Wait at the end: JAX, which launches on streams of its own, may free what it gave."""
    with _device.launching_at(number, 0):
        yield
        _device.cuda().synchronize()
