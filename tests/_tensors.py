"""Tensors of torch over NumPy arrays, and how their bits are compared."""

import numpy as np
import torch
from _frameworks import bits


def tensor(array):
    """Return a tensor of the array's memory."""
    if array.dtype.name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        carrier = {1: np.uint8, 2: np.int16}[array.itemsize]
        return torch.from_numpy(array.view(carrier)).view(getattr(torch, array.dtype.name))
    return torch.from_numpy(array)


def tensors(arguments):
    return {n: tensor(x) if isinstance(x, np.ndarray) else x for n, x in arguments.items()}


def numbers(result):
    """Return a tensor's bytes."""
    assert type(result) is torch.Tensor
    if result.dtype is torch.bfloat16:
        result = result.view(torch.int16)
    return result.numpy().tobytes()


def assert_same(results, expected):
    for found, array in zip(results, expected, strict=True):
        assert str(found.dtype) == f"torch.{array.dtype.name}"
        assert tuple(found.shape) == array.shape
        assert numbers(found) == bits(array)
