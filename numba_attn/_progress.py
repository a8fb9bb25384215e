"""A progress line: redrawn on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from typing import TextIO

_ERASE = "\r\x1b[K"


class Progress:
    """Says on a stream, stderr by default, what is being done.

    Elsewhere than on a terminal each stage is one line, without its percentages.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._redraws = self._stream.isatty()
        self._stage = ""

    def say(self, what: str, fraction: float | None = None) -> None:
        """Show a stage, and how much of it is done."""
        if self._redraws:
            done = "" if fraction is None else f" {fraction:4.0%}"
            self._write(f"{_ERASE}{what}{done}")
        elif what != self._stage:
            self._write(f"{what}\n")
        self._stage = what

    def clear(self) -> None:
        """Take the line away, before something else is printed."""
        if self._redraws:
            self._write(_ERASE)

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
