"""Timing several contenders in one process: in bursts, in turn, over pools in rotation."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

Call = Callable[[], object]


def in_turn(
    contenders: Mapping[str, Sequence[Call]],
    seconds: float,
    *,
    burst: int = 8,
    uncounted: int = 1,
    rest: float = 0.0,
    on_progress: Callable[[float], None] = lambda fraction: None,
) -> dict[str, list[float]]:
    """Time contenders in bursts, in turn, so that what disturbs the machine disturbs all alike.

    Parameters
    ----------
    contenders : mapping of str to sequence of callables
        One callable per pool. Each is called once before the clock starts (it may compile).
    seconds : float
        How long to go on, about; there are at least three rounds.
    burst : int
        Timed calls of a contender in a row. A burst is cut short after a quarter of a second.
    uncounted : int
        Calls before each burst that are not timed: the caches and the threads warm up.
    rest : float
        Seconds of sleep before each burst. OpenMP workers spin for a while after their region, and
        would hold the cores of the contender that comes next.
    on_progress : callable
        Called with the fraction of `seconds` that is over, after each round.

    Returns
    -------
    dict of str to list of float
        Seconds of every timed call.
    """
    for call in itertools.chain(*contenders.values()):
        call()
    times: dict[str, list[float]] = {name: [] for name in contenders}
    rotation = {name: itertools.cycle(calls) for name, calls in contenders.items()}
    start = time.perf_counter()
    for rounds in itertools.count(1):
        for name, calls in rotation.items():
            time.sleep(rest)
            for _ in range(uncounted):
                next(calls)()
            times[name] += _burst(calls, burst)
        elapsed = time.perf_counter() - start
        on_progress(min(1.0, elapsed / seconds))
        if elapsed >= seconds and rounds >= 3:
            return times
    raise AssertionError("unreachable")


def _burst(calls: itertools.cycle[Call], count: int, limit: float = 0.25) -> list[float]:
    """Time up to `count` calls, for about `limit` seconds."""
    times: list[float] = []
    while len(times) < count and sum(times) < limit:
        call = next(calls)
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return times


def spread(times: Sequence[float]) -> float:
    """Return the interquartile range over the median: how far to trust the median."""
    low, middle, high = statistics.quantiles(times, n=4)
    return (high - low) / middle
