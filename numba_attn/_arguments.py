"""Types of command-line arguments: each says what is wrong and what to give instead."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from collections.abc import Callable

from . import _threads
from ._workloads import WORKLOADS, Workload, parse_shape

_UNITS = {"": 1, "K": 2**10, "M": 2**20}
_MOST_TOKENS = 2**31 - 1


def workloads(text: str) -> list[Workload]:
    """Read names such as ``W1,W3``."""
    names = text.split(",")
    if unknown := [name for name in names if name not in WORKLOADS]:
        raise ArgumentTypeError(
            f"unknown workload {unknown[0]!r}; choose from {', '.join(WORKLOADS)}"
        )
    return [WORKLOADS[name] for name in names]


def shape(text: str) -> Workload:
    """Read a workload of one's own; see `parse_shape`."""
    try:
        return parse_shape(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None


def thread_count(text: str) -> int:
    """Read a number of threads that this process can have cores for."""
    cores = _threads.usable_cores()
    if not text.isdecimal() or not 1 <= int(text) <= cores:
        raise ArgumentTypeError(
            f"expected 1 to {cores}, the cores this process may use, got {text!r}"
        )
    return int(text)


def whole(least: int) -> Callable[[str], int]:
    """Read a whole number that is not below `least`."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise ArgumentTypeError(f"expected a whole number, at least {least}, got {text!r}")
        return int(text)

    return read


def token_count(text: str) -> int:
    """Read a number of tokens, such as ``20000``, ``128K`` (of 1024) or ``1M``."""
    match = re.fullmatch(r"([0-9]+)([KM]?)", text.upper())
    count = int(match[1]) * _UNITS[match[2]] if match else 0
    if not 1 <= count <= _MOST_TOKENS:
        raise ArgumentTypeError(
            f"expected 1 to {_MOST_TOKENS} tokens, such as 20000, 128K or 1M, got {text!r}"
        )
    return count


def heads(text: str) -> tuple[int, int]:
    """Read numbers of query and kv heads, such as ``32/8``."""
    match = re.fullmatch(r"([0-9]+)/([0-9]+)", text)
    num_q_heads, num_kv_heads = (int(match[1]), int(match[2])) if match else (0, 0)
    if num_q_heads * num_kv_heads == 0 or num_q_heads % num_kv_heads:
        raise ArgumentTypeError(f"expected Hq/Hkv, a multiple of Hkv, such as 32/8, got {text!r}")
    return num_q_heads, num_kv_heads
