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
_plain: set[type] = {np.ndarray, type(None), bool, int, float, str, list}
_MOST_PLAIN = 200
_NOWHERE = contextlib.nullcontext()


@functools.lru_cache(maxsize=128)
def _of_type(kind: Any) -> str | None:
    names = ((base.__module__, base.__name__) for base in kind.__mro__)
    return next((_BASES[name] for name in names if name in _BASES), None)


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

    def decorated(function: Callable[..., Any]) -> Any:
        names = tuple(inspect.signature(function).parameters)
        place = names.index(lead)

        @functools.wraps(function)
        def with_arrays(*args: Any, **options: Any) -> Any:
            plain = _all_plain(args) and _all_plain(options.values())
            if plain and not (lead in ("state", "self") and _state_of_framework(args, options)):
                return function(*args, **options)
            first = args[place] if place < len(args) else options.get(lead)
            with _launching((first, *args, *options.values())):
                taken = [_taken(*pair, writes) for pair in zip(names, args, strict=False)]
                named = {name: _taken(name, x, writes) for name, x in options.items()}
                found = function(*taken, *args[len(names) :], **named)
                return _given(found, first, named.get("out"), options.get("out"))

        return with_arrays

    return decorated


def _all_plain(values: Iterable[Any]) -> bool:
    return _plain.issuperset(map(type, values))


def _state_of_framework(args: tuple[Any, ...], options: dict[str, Any]) -> bool:
    state = args[0] if args else options.get("state")  # or self
    return getattr(state, "framework", None) is not None


@functools.cache
def _module(framework: str) -> ModuleType:
    return importlib.import_module(f"._{framework}_arrays", __package__)


def _taken(name: str, value: Any, writes: tuple[str, ...]) -> Any:
    """Return an argument as the function is to see it."""
    kind: Any = type(value)
    if kind in _plain:
        return value
    framework = _of_type(kind)
    if framework is not None:
        return _module(framework).taken(name, value, name in writes)
    if kind is tuple:
        return tuple(_taken(name, one, ()) for one in value)
    if len(_plain) < _MOST_PLAIN:
        _plain.add(kind)
    return value


def _given(found: Any, first: Any, taken_out: Any, out: Any) -> Any:
    """Return results as arrays of the framework of `first`; what was written into is `out`."""
    framework = framework_of(first)
    if hasattr(found, "framework"):  # a new state
        found.framework = framework

    def give(array: Any) -> Any:
        if array is taken_out and out is not None:
            return out
        if framework is None or not hasattr(array, "strides"):
            return array
        return _module(framework).given(array, first)

    return tuple(map(give, found)) if type(found) is tuple else give(found)


def _launching(values: Iterable[Any]) -> contextlib.AbstractContextManager[Any]:
    """Launch where the framework of the first device array does."""
    for value in values:
        framework = framework_of(value)
        if framework is not None:
            context: contextlib.AbstractContextManager[Any] = _module(framework).launching(value)
            if context is not None:
                return context
    return _NOWHERE
