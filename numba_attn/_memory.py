"""How much memory this process takes, and a limit to it."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

_STATUS = pathlib.Path("/proc/self/status")
_resource: Any = (  # Windows has none
    importlib.import_module("resource") if importlib.util.find_spec("resource") else None
)


@contextlib.contextmanager
def limited(room: int) -> Iterator[int | None]:
    """Let this process take `room` more bytes of addresses, while the context lasts.

    Gives the limit in all; None where the system cannot set one, or does not tell what is taken.
    """
    taken = addresses()
    if _resource is None or taken is None:
        yield None
        return
    before, most = _resource.getrlimit(_resource.RLIMIT_AS)
    set_before = [limit for limit in (before, most) if limit != _resource.RLIM_INFINITY]
    limit = min([taken + room, *set_before])
    _resource.setrlimit(_resource.RLIMIT_AS, (limit, most))
    try:
        yield limit
    finally:
        _resource.setrlimit(_resource.RLIMIT_AS, (before, most))


def addresses() -> int | None:
    """Return the bytes of addresses that this process has taken; None if that is not told."""
    return _status("VmSize")


def peak() -> int | None:
    """Return the most bytes that were resident at a time; None if that is not told."""
    told = _status("VmHWM")
    if told is not None or _resource is None:
        return told
    most: int = _resource.getrusage(_resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def _status(field: str) -> int | None:
    """Return a size that Linux tells of this process."""
    if not _STATUS.exists():
        return None
    lines = (line.partition(":") for line in _STATUS.read_text().splitlines())
    found = {name: text for name, _, text in lines}.get(field)
    return None if found is None else int(found.split()[0]) * 1024
