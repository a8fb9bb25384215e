"""Calls of append_kv on any implementation: host arrays in, what the pools hold after it out."""

import ml_dtypes
import numpy as np

from numba_attn import _arrays

SOURCES = ("bfloat16", "float16", "float32")
TARGETS = (*SOURCES, "float8_e4m3fn", "float8_e5m2", "int8")
QUANTISED = TARGETS[3:]
MOST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "int8": 127.0}
WRITTEN = ("k_pool", "v_pool", "k_scale", "v_scale")


def dtype_of(name):
    return np.dtype(getattr(ml_dtypes, name, None) or name)


def numbers(rng, shape, dtype):
    """Draw numbers that round up and down in every format, and some that are too large for it."""
    x = rng.standard_normal(shape) * 2.0 ** rng.integers(-12, 12, shape)
    return x.astype(dtype)


def bits(array):
    """Return the carrier of an array."""
    return array.view(_arrays.CARRIERS[_arrays.format_of(array.dtype)])


def on_device(array):
    from numba import cuda

    if array.dtype.kind in "iuf" and array.dtype.itemsize > 1:
        return cuda.to_device(array)
    # A real device takes no dtype of ml_dtypes from the host.
    return cuda.to_device(bits(array)).view(array.dtype)


def append(backend, **arguments):
    """Call append_kv on copies of what it writes; return these as host arrays."""
    given = {
        name: x.copy() if name in WRITTEN and isinstance(x, np.ndarray) else x
        for name, x in arguments.items()
    }
    if backend.name == "cuda":
        slots = np.asarray(given["slot_mapping"], np.int64)
        arrays = {name: x for name, x in given.items() if isinstance(x, np.ndarray) and x.ndim}
        given |= {name: on_device(x) for name, x in (arrays | {"slot_mapping": slots}).items()}
    assert backend.module.append_kv(**given) is None
    return {
        name: host(given[name], arguments[name])
        for name in WRITTEN
        if isinstance(arguments.get(name), np.ndarray)
    }


def host(array, like):
    return np.asarray(_arrays.to_host(array)).view(like.dtype)


def same(ours, theirs):
    """Assert that what two calls have written has the same bits, or NaN alike."""
    assert set(ours) == set(theirs)
    for name in ours:
        a, b = ours[name], theirs[name]
        wide = [x.astype(np.float32) for x in (a, b)]
        np.testing.assert_array_equal(*(np.isnan(x) for x in wide), err_msg=name)
        finite = ~np.isnan(wide[0])
        assert a[finite].tobytes() == b[finite].tobytes(), name
