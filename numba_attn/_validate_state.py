"""The input contract of states, and its messages; the rest is in `_validate`."""

from __future__ import annotations

import numbers
from typing import Any

from ._plan import Sizes
from ._validate import overlap


def positive_sizes(**named: Any) -> list[int]:
    """Check named sizes, of which those of the batch may be 0; return them as ints."""
    for name, size in named.items():
        if type(size) is not int and not _is_integer(size):
            raise TypeError(f"{name}: expected an integer, got {type(size).__name__}; pass an int")
        least = 0 if name in ("num_seqs", "num_queries") else 1
        if size < least:
            raise ValueError(
                f"{name}: must be at least {least}, got {size}; pass the size of q's or v's axis"
            )
    return [int(size) for size in named.values()]


def whole(name: str, number: Any, least: int) -> int:
    """Check a whole number that has a least value."""
    if not _is_integer(number):
        raise TypeError(f"{name}: expected an integer, got {type(number).__name__}; pass an int")
    if number < least:
        raise ValueError(f"{name}: must be at least {least}, got {number}; pass a larger number")
    return int(number)


def _is_integer(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_state(name: str, state: Any, kind: type) -> None:
    """Check that an argument is a state."""
    if not isinstance(state, kind):
        raise TypeError(
            f"{name}: expected an AttentionState, got {type(state).__name__}; "
            "make one with AttentionState.like(q, v_pool)"
        )


def state_fits(state: Any, sizes: Sizes) -> None:
    """Check a state [queries, Hq, Dv] against q and v_pool."""
    expected = (sizes.num_rows, sizes.num_q_heads, sizes.v_head_dim)
    if tuple(state.o.shape) != expected:
        raise ValueError(
            f"state: expected [queries, Hq, Dv] = {expected} from q and v_pool, got "
            f"{tuple(state.o.shape)}; make one with AttentionState.like(q, v_pool)"
        )


def state_device(state: Any, kind: str) -> None:
    """Check that a state is where a call runs."""
    if state.device != kind:
        raise ValueError(
            f"state: must be on the device of the call, {kind!r}, got one on {state.device!r}; "
            f"make one with AttentionState(..., device={kind!r})"
        )


def states_merge(state: Any, other: Any) -> None:
    """Check that two states can be merged."""
    if state is other or overlap(state.buffer, other.buffer):
        raise ValueError(
            "other: must be a state of other keys, got `state` itself, whose keys would count "
            "twice; pass a state over disjoint keys"
        )
    if state.device != other.device:
        raise ValueError(
            f"other: must be on the device of state, {state.device!r}, got one on "
            f"{other.device!r}; make both on one device"
        )
    if tuple(state.o.shape) != tuple(other.o.shape):
        raise ValueError(
            f"other: expected [queries, Hq, Dv] = {tuple(state.o.shape)} as in state, got "
            f"{tuple(other.o.shape)}; pass a state of the same queries"
        )


def out_device(found: str, expected: str) -> None:
    """Check that a caller's output array is on the device of the state."""
    if found != expected:
        raise ValueError(
            f"out: must be on the device of state, {expected!r}, got an array on {found!r}; "
            "allocate it there, or leave it out"
        )
