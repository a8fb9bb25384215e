"""Arrays of torch, JAX and CuPy, at the edge: told by their types, viewed, and given back.

A public function sees NumPy arrays and Numba's device arrays only. This module imports no
framework: the type of an array names the one it is of, whose module here is imported then.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import numpy as np

from . import _device

_BASES = {
    ("torch", "Tensor"): "torch",
    ("jax", "Array"): "jax",
    ("jax", "jaxlib._jax.Array"): "jax",
    ("jaxlib._jax", "ArrayImpl"): "jax",
    ("jaxlib.xla_extension", "ArrayImpl"): "jax",
    ("jax._src.core", "Tracer"): "jax",
    ("cupy", "ndarray"): "cupy",
}
"""Classes of arrays, by module and name; those of a subclass are its bases."""

# Of no framework. Types that were looked at join, so that the next look is a quick one.
_plain: set[type] = {np.ndarray, type(None), bool, int, float, str, list, tuple}
_MOST_PLAIN = 200
_HERE = contextlib.nullcontext()


@functools.lru_cache(maxsize=128)
def _of_type(kind: Any) -> str | None:
    names = ((base.__module__, base.__name__) for base in kind.__mro__)
    return next((_BASES[name] for name in names if name in _BASES), None)


@functools.lru_cache(maxsize=128)
def _module_of(kind: Any) -> Any:
    """Return what takes arrays of a type, a module of this package; None where NumPy does."""
    framework = _of_type(kind)
    return None if framework is None else _module(framework)


@functools.cache
def _module(framework: str) -> ModuleType:
    return importlib.import_module(f"._{framework}_arrays", __package__)


def framework_of(value: Any) -> str | None:
    """Return the framework of an array, or of a state that was made of its arrays.

    Examples
    --------
    >>> framework_of(np.zeros(3)) is None
    True
    """
    kind: Any = type(value)
    return _of_type(kind) or getattr(value, "framework", None)


def taking_arrays(lead: str, *, writes: tuple[str, ...] = ("out",)) -> Callable[..., Any]:
    """Let a function be given arrays of any framework.

    Parameters
    ----------
    lead : str
        The argument, an array or a state, whose kind of array the results are.
    writes : tuple of str
        The arguments that are written to.
    """
    of_state = lead in ("state", "self")

    def decorated(function: Callable[..., Any]) -> Any:
        names = tuple(inspect.signature(function).parameters)
        place = names.index(lead)

        @functools.wraps(function)
        def with_arrays(*args: Any, **options: Any) -> Any:
            first = args[place] if place < len(args) else options.get(lead)
            plain = _all_plain(args) and _all_plain(options.values())
            if plain and not (of_state and getattr(first, "framework", None)):
                return function(*args, **options)
            taken, named = list(args), options.copy()
            for i, value in enumerate(args[: len(names)]):
                if type(value) not in _plain:
                    taken[i] = _taken(names[i], value, writes)
            for name, value in options.items():
                if type(value) not in _plain:
                    named[name] = _taken(name, value, writes)
            if of_state or not (_all_plain(taken) and _all_plain(named.values())):
                with _launching((first, *args, *options.values())):
                    found = function(*taken, **named)
                    return _given(found, first, named.get("out"), options.get("out"))
            found = function(*taken, **named)
            return _given(found, first, named.get("out"), options.get("out"))

        return with_arrays

    return decorated


def _all_plain(values: Iterable[Any]) -> bool:
    return _plain.issuperset(map(type, values))


def _taken(name: str, value: Any, writes: tuple[str, ...]) -> Any:
    """Return an argument as the function is to see it."""
    kind: Any = type(value)
    module = _module_of(kind)
    if module is not None:
        return module.taken(name, value, name in writes)
    if len(_plain) < _MOST_PLAIN and not _device.is_device_array(kind):
        _plain.add(kind)
    return value


def kept(name: str, value: Any) -> Any:
    """Return an argument as it may be kept beyond a call."""
    kind: Any = type(value)
    module = _module_of(kind)
    return value if module is None else module.taken(name, value, False, kept=True)


def _given(found: Any, first: Any, taken_out: Any, out: Any) -> Any:
    """Return results as arrays of the framework of `first`; what was written into is `out`."""
    if found is None:
        return None
    if type(found) is tuple:
        return tuple([_given(one, first, taken_out, out) for one in found])
    if out is not None and found is taken_out:
        return out
    framework = framework_of(first)
    if framework is None:
        return found
    if hasattr(found, "framework"):  # a new state
        found.framework = framework
        return found
    return _module(framework).given(found, first)


def _launching(values: Iterable[Any]) -> contextlib.AbstractContextManager[Any]:
    """Launch where the framework of the first array that is on a device does."""
    frameworks = ((value, framework_of(value)) for value in values)
    contexts = (_module(name).launching(value) for value, name in frameworks if name is not None)
    return next((context for context in contexts if context is not None), _HERE)
