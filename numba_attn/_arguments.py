"""Types of command-line arguments: each says what is wrong and what to give instead."""

from __future__ import annotations

from argparse import ArgumentTypeError

from . import _threads
from ._workloads import WORKLOADS, Workload, parse_shape


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
