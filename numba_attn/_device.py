"""Choose the device: "auto" | "cpu" | "cuda" -> a backend module, imported lazily.

The data decides; an explicit request never falls back silently, and the error says why.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import platform
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numba
import numpy as np

from ._types import Array, HostArray

DEVICES = ("auto", "cpu", "cuda")


def cuda() -> Any:
    """Return the module ``numba.cuda`` (imported on first use: it is slow to import)."""
    return importlib.import_module("numba.cuda")


def is_simulator() -> bool:
    """Tell whether Numba's CUDA simulator stands in for a device."""
    return bool(getattr(numba.config, "ENABLE_CUDASIM", False))


def is_device_array(array: Any) -> bool:
    """Tell whether an object is an array on a GPU (or in the simulator)."""
    if isinstance(array, np.ndarray):  # the usual case, told quickly
        return False
    return hasattr(array, "__cuda_array_interface__") or hasattr(array, "__cuda_ndarray__")


def as_device_array(array: Array) -> Array:
    """Wrap anything with ``__cuda_array_interface__`` as a Numba device array, without a copy."""
    if hasattr(array, "__cuda_ndarray__"):
        return array
    # Whoever names a stream has put it in order with the one that the array came from.
    return cuda().as_cuda_array(array, sync=not stream_in_use())


def simulated(array: HostArray) -> Array:
    """Return a host array as one of the simulator's device."""
    return _simulated_class()(array)


@functools.cache
def _simulated_class() -> Any:
    return type(cuda().device_array(1, np.float32))


def own(array: Any) -> Any:
    """Return another library's device array as Numba's; anything else as it is."""
    return as_device_array(array) if is_device_array(array) else array


def cuda_problem() -> str | None:
    """Say why CUDA cannot be used here; None where it can."""
    if is_simulator():
        return None
    try:
        return _driver_problem(cuda())
    except Exception as error:  # whatever a broken driver or toolkit raises is the answer
        return _one_line(error) or type(error).__name__


def _driver_problem(module: Any) -> str | None:
    """Say what is wrong with the driver, the toolkit or Numba's CUDA target, in this order."""
    available = module.is_available()  # this also starts the driver
    if (error := module.cuda_error()) is not None:
        return f"no usable NVIDIA driver ({_one_line(error)})"
    if getattr(module, "implementation", "") != "NVIDIA":
        return "there is an NVIDIA driver, but the package numba-cuda is not installed"
    if not available:
        return "there is an NVIDIA driver, but no CUDA toolkit that Numba can use (no NVVM library)"
    return None


def _one_line(error: object) -> str:
    return " ".join(str(error).split()).rstrip(".:")


def home(**arrays: Any) -> str:
    """Say where the arrays of a call are: "cpu" or "cuda".

    Raises
    ------
    ValueError
        If some are on the host and some on a device.
    """
    where = {name: is_device_array(a) for name, a in arrays.items() if a is not None}
    if any(where.values()) and not all(where.values()):
        on = [name for name, device in where.items() if device]
        off = [name for name, device in where.items() if not device]
        raise ValueError(
            f"all arrays must be on one device: {', '.join(on)} are on a CUDA device, "
            f"{', '.join(off)} on the host; copy the ones over (numba.cuda.to_device, "
            ".copy_to_host)"
        )
    return "cuda" if any(where.values()) else "cpu"


def resolve(device: str, home: str) -> str:
    """Return "cpu" or "cuda" for a requested device and the arrays' home.

    Raises
    ------
    ValueError
        If `device` is no known name.
    RuntimeError
        If CUDA is asked for and cannot be used.
    """
    if not isinstance(device, str) or device not in DEVICES:
        raise ValueError(f"device: expected one of {', '.join(map(repr, DEVICES))}, got {device!r}")
    kind = home if device == "auto" else device
    if kind == "cuda":
        require_cuda()
    return kind


def require_cuda() -> None:
    """Raise RuntimeError, saying why, where CUDA cannot be used."""
    if (problem := cuda_problem()) is not None:
        raise RuntimeError(
            f"device='cuda' is not available: {problem}. Install numba_attn[cuda] on a machine "
            "with an NVIDIA driver, set NUMBA_ENABLE_CUDASIM=1 for the simulator, or use "
            "device='cpu'"
        )


_streams = threading.local()


def streamed(function: Callable[..., Any]) -> Any:
    """Let a function launch on the stream that its keyword `stream` names."""

    @functools.wraps(function)
    def on_stream(*args: Any, stream: Any = None, **options: Any) -> Any:
        if stream is None:
            return function(*args, **options)
        with launching_on(stream):
            return function(*args, stream=stream, **options)

    return on_stream


@contextlib.contextmanager
def launching_on(stream: Any) -> Iterator[None]:
    """Let this thread launch on a stream."""
    before = getattr(_streams, "current", None)
    _streams.current = stream
    try:
        yield
    finally:
        _streams.current = before


@contextlib.contextmanager
def launching_at(number: int | None, pointer: int) -> Iterator[None]:
    """Let this thread launch on a GPU, by default its own, and there on a stream, 0: the default.

    A stream that is named in the call goes before.
    """
    with on_gpu(number), launching_on(pointer):
        yield


def on_gpu(number: int | None) -> contextlib.AbstractContextManager[Any]:
    """Make a GPU this thread's for a while; None: the one that it has."""
    gpu: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    return gpu if number is None else cuda().gpus[number]


def stream_in_use() -> Any:
    """Return the Numba stream of this thread's launches; 0 is the default stream."""
    stream = getattr(_streams, "current", None)
    return 0 if stream is None else as_stream(stream)


def wait() -> None:
    """Wait for the stream in use, where a copy to the host would not."""
    if stream := stream_in_use():
        stream.synchronize()


def as_stream(stream: Any) -> Any:
    """Return the Numba stream for a stream of Numba, cuda.core, torch or CuPy, or a raw pointer.

    Raises
    ------
    TypeError
        If `stream` is nothing of the kind.
    """
    if type(stream).__module__.startswith("numba."):
        return stream
    pointer = _pointer(stream)
    return cuda().external_stream(pointer) if pointer else 0


def _pointer(stream: Any) -> int:
    if type(stream) is int:
        return stream
    if hasattr(stream, "__cuda_stream__"):  # of cuda.core, and of who follows its protocol
        return int(stream.__cuda_stream__()[1])
    for name in ("cuda_stream", "ptr"):  # of torch, of CuPy
        if hasattr(stream, name):
            return int(getattr(stream, name))
    raise TypeError(
        "stream: expected a stream of Numba, cuda.core, torch or CuPy, or its pointer as an int, "
        f"got {type(stream).__name__}; make one with numba.cuda.stream()"
    )


def gpu_in_use() -> Any:
    """Return this thread's GPU, as a context manager that makes it another thread's."""
    number = 0 if is_simulator() else cuda().get_current_device().id
    return cuda().gpus[number]


@functools.cache
def backend(kind: str) -> ModuleType:
    """Return the twin that runs on a device."""
    return importlib.import_module(f".kernels.{kind}", __package__)


def available_devices() -> dict[str, str]:
    """Name the devices that can be used here.

    Returns
    -------
    dict of str to str
        Names for the argument ``device=``, each with what it is. The CUDA simulator is named as
        such; ``device="auto"`` never picks it for host arrays.

    Examples
    --------
    >>> import numba_attn
    >>> "cpu" in numba_attn.available_devices()
    True
    """
    devices = {"cpu": f"{platform.processor() or platform.machine()}, {os.cpu_count()} threads"}
    if is_simulator():
        devices["cuda"] = "simulator (NUMBA_ENABLE_CUDASIM=1): tests indexing and order, no speed"
    elif cuda_problem() is None:
        gpu = cuda().get_current_device()
        name = gpu.name.decode() if isinstance(gpu.name, bytes) else gpu.name
        devices["cuda"] = "{}, compute capability {}.{}".format(name, *gpu.compute_capability)
    return devices
