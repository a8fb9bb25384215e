"""How far a long call is, shown or told."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

Report = Callable[[int], None]  # is called with the bytes so far


def check(progress: Any) -> None:
    """Check the argument `progress`."""
    if progress is True:
        _tqdm()
    elif not (progress is None or progress is False or callable(progress)):
        raise TypeError(
            f"progress: expected True, False, None or a function of (bytes so far, bytes in all), "
            f"got {type(progress).__name__}"
        )


@contextlib.contextmanager
def reporting(progress: Any, total: int) -> Iterator[Report | None]:
    """Give what is to be told the bytes so far; None where nobody asks."""
    if callable(progress):
        yield lambda done: progress(done, total)
    elif progress:
        with _tqdm()(total=total, unit="B", unit_scale=True, desc="K/V") as bar:
            yield lambda done: bar.update(done - bar.n)
    else:
        yield None


def _tqdm() -> Any:
    try:
        import tqdm
    except ImportError as error:
        raise ImportError(
            "progress: True needs tqdm; install numba_attn[progress], or pass a function"
        ) from error
    return tqdm.tqdm
