"""What the front ends share: errors in their users' words, and options spelt in their ways."""

from __future__ import annotations

import numbers
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from .. import _arrays, _device
from .._types import Array, HostArray


def naming(**names: str) -> Callable[..., Any]:
    """Make a way to call the package's functions whose errors name a front end's arguments."""
    words = re.compile(rf"\b({'|'.join(names)})\b")

    def call(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        try:
            return function(*args, **options)
        except (TypeError, ValueError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(words.sub(lambda word: names[word[0]], str(error))) from error

    return call


def cap(name: str, value: Any) -> float | None:
    """Return a softcap as the package has it: None where theirs is 0, negative or None."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, numbers.Real)):
        raise TypeError(
            f"{name}: expected a real number, got {type(value).__name__}; pass 0.0 for no cap"
        )
    return None if value is None or value <= 0 else float(value)


def window(name: str, left: Any) -> int | None:
    """Return the keys of a window that reaches so far to the left of the query; negative: all."""
    if isinstance(left, bool) or not isinstance(left, numbers.Integral):
        raise TypeError(
            f"{name}: expected an integer, got {type(left).__name__}; pass -1 for no window"
        )
    return None if left < 0 else int(left) + 1


def whole(name: str, value: Any, least: int, most: int | None, advice: str) -> int:
    """Return an integer within bounds."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name}: expected an integer, got {type(value).__name__}; {advice}")
    number = int(value)
    if number < least or (most is not None and number > most):
        rule = f"at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{name}: must be {rule}, got {number}; {advice}")
    return number


def beside(array: Array, values: HostArray) -> Array:
    """Return a host array where another array is: there, or on the GPU."""
    return _arrays.bring("cuda", values) if _device.is_device_array(array) else values


def on_host(name: str, values: Any) -> HostArray:
    """Return integers as a NumPy array, wherever they are."""
    values = _arrays.integers(name, values)
    return _arrays.to_host(values)


def refuse(name: str, value: Any, why: str, instead: str) -> None:
    """Raise where an argument that is not taken was given."""
    if value is not None:
        raise ValueError(f"{name}: {why}, got {_short(value)}; {instead}")


def _short(value: Any) -> str:
    if hasattr(value, "shape"):
        return f"an array of shape {tuple(value.shape)}"
    text = repr(value)
    return text if np.isscalar(value) and len(text) < 40 else type(value).__name__
