"""Run one function on several cores: the calling thread and a few pool workers.

The functions are kernels that release the GIL and take their work from a shared counter, so a
worker that comes late, or never, costs nothing. Threads of the caller may come at once: they share
the pool's workers. The pool is made anew after a fork.
"""

from __future__ import annotations

import math
import numbers
import os
import pathlib
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None


def usable_cores() -> int:
    """Count the cores this process may use: its affinity, and the quota of its control group."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, math.ceil(min(cores or 1, _quota())))


def _quota(root: str = "/sys/fs/cgroup") -> float:
    """Return the cores that a control group (a container) grants; infinity without a limit."""
    for files in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        try:
            texts = [pathlib.Path(root, file).read_text() for file in files]
            quota, period = (float(word) for word in " ".join(texts).split())
        except (OSError, ValueError):  # another version of control groups, or "max": no limit
            continue
        return quota / period if quota > 0 else math.inf
    return math.inf


def _default_num_threads() -> int:
    """Return NUMBA_ATTN_NUM_THREADS, or the usable cores."""
    text = os.environ.get("NUMBA_ATTN_NUM_THREADS", "")
    if not text:
        return usable_cores()
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(
            f"NUMBA_ATTN_NUM_THREADS: must be a whole number, at least 1, got {text!r}; "
            "unset it to use all cores"
        )
    return int(text)


_num_threads = _default_num_threads()


def get_num_threads() -> int:
    """Return the number of threads that CPU calls use, the calling one included.

    Returns
    -------
    int
        By default the environment variable ``NUMBA_ATTN_NUM_THREADS``, else the cores this process
        may use (affinity and container limits respected).

    Examples
    --------
    >>> import numba_attn
    >>> numba_attn.get_num_threads() >= 1
    True
    """
    return _num_threads


def set_num_threads(num_threads: int) -> None:
    """Set the number of threads that CPU calls use; results do not depend on it, bit for bit.

    Parameters
    ----------
    num_threads : int
        The calling thread included; at least 1.

    Raises
    ------
    TypeError
        If `num_threads` is no integer.
    ValueError
        If it is below 1.

    Examples
    --------
    >>> import numba_attn
    >>> numba_attn.set_num_threads(numba_attn.get_num_threads())
    """
    global _num_threads, _pool
    given: Any = num_threads
    if isinstance(given, bool) or not isinstance(given, numbers.Integral):
        raise TypeError(
            f"num_threads: expected an integer, got {type(given).__name__}; pass an int"
        )
    if num_threads < 1:
        raise ValueError(
            f"num_threads: must be at least 1, got {num_threads}; 1 is the calling thread alone"
        )
    with _lock:
        _num_threads = int(num_threads)
        _pool = None  # calls in flight keep theirs; idle workers end with it


def _workers() -> ThreadPoolExecutor:
    global _pool
    with _lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(max(1, _num_threads - 1), "numba_attn")
        return _pool


def run(task: Callable[..., Any], args: tuple[Any, ...], num_threads: int) -> None:
    """Call ``task(*args)`` in several threads, this one among them, and wait for all.

    A call that no worker has begun when this thread's returns is dropped: its work is done by then.
    """
    futures: list[Future[Any]] = []
    try:
        for _ in range(num_threads - 1):
            futures.append(_workers().submit(task, *args))
    except RuntimeError:  # the interpreter is ending and starts no threads: this one does it all
        pass
    try:
        task(*args)
    finally:
        for future in futures:
            if not future.cancel():
                future.result()


def _after_fork() -> None:
    """Forget the parent's workers and locks; they do not exist in the child."""
    global _lock, _pool
    _lock, _pool = threading.Lock(), None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
