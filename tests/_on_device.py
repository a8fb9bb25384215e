"""Arrays of any strides on the device, and what is behind the public functions there."""

import importlib
from types import SimpleNamespace

import ml_dtypes
import numpy as np
from _cases import BFLOAT16

from numba_attn import _arrays, _device, _plan_cuda
from numba_attn._call import Formats, Options


def twin():
    """Return the twin; it is imported late, as a machine without CUDA never needs it."""
    return _device.backend("cuda")


def rows_cuda():
    return importlib.import_module("numba_attn.kernels.rows_cuda")


def step_cuda():
    return importlib.import_module("numba_attn.kernels.step_cuda")


def dtype_of(name):
    """Return the dtype of a number format."""
    return np.dtype(getattr(ml_dtypes, name, name))


def to_device(view):
    """Put a host array on the device, with its strides; bfloat16 as its bits."""
    view = view.view(np.uint16) if view.dtype == BFLOAT16 else view
    forwards = tuple(slice(None, None, -1 if s < 0 else 1) for s in view.strides)
    span = _plan_cuda.span(view.shape, view.strides, view.itemsize)
    run = np.lib.stride_tricks.as_strided(view[forwards], (span.size,), (view.itemsize,))
    memory = _device.cuda().to_device(run.copy())
    if _device.is_simulator():
        first = memory[span.offset :]
        return type(memory)(np.lib.stride_tricks.as_strided(first._ary, view.shape, view.strides))
    interface = memory.__cuda_array_interface__
    pointer = interface["data"][0] + span.offset * view.itemsize
    interface |= {"data": (pointer, False), "shape": view.shape, "strides": view.strides}
    owner = SimpleNamespace(__cuda_array_interface__=interface, memory=memory)
    return _device.cuda().as_cuda_array(owner)


def places_of(array):
    """Return where the elements of a device array lie in its run of memory."""
    flat = _arrays.flatten(array)
    grid = np.indices(array.shape).reshape(len(array.shape), -1)
    return flat.offset + np.array(flat.strides) @ grid


def read(array):
    """Copy a device array of any strides to the host."""
    return _arrays.to_host(_arrays.flatten(array).memory)[places_of(array)].reshape(array.shape)


def reads_wide(k_pool, v_pool):
    """Tell whether two pools are read 16 bytes at a time."""
    pools = (rows_cuda().of_pool(pool, _arrays.flatten(pool)) for pool in (k_pool, v_pool))
    return _plan_cuda.step_variant(*pools, Formats(), Options(scale=1.0)).wide
