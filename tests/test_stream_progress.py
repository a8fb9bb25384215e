"""What is told of a stream while it runs."""

import sys
import time
import types

import numpy as np
import pytest
from _streaming import (
    LENS,
    FaultError,
    Watched,
    array_source,
    case,
    check_same,
    check_untouched,
    stream,
)

from numba_attn import Streamer, streamer

pytestmark = pytest.mark.usefixtures("no_reader_is_left")


def block_bytes(paged):
    return sum(pool[0].nbytes for pool in paged[:2])


@pytest.mark.parametrize("name", ["plain", "window", "fp8"])
def test_progress_is_told_in_bytes(monkeypatch, name):
    monkeypatch.setattr(streamer, "_REPORT_SECONDS", 0.001)
    seqs, paged, expected = case(name)
    told, expected_at = [], []

    def wait_to_be_told(number, ids):
        if number % 4 == 3:
            enough = len(told) + 2  # the second one has been counted during this read
            while len(told) < enough:
                time.sleep(0.001)
            folded = sum(map(len, source.reads[:number]))
            expected_at.append((told[-1][0], folded * block_bytes(paged)))

    source = Watched(array_source(paged), wait_to_be_told)
    options = {"prefetch": 0, "progress": lambda *numbers: told.append(numbers)}
    answer = stream(seqs, paged, source, **options)
    check_same(seqs, answer, expected, bits=False)
    assert [one for one, _ in expected_at] == [other for _, other in expected_at] != []
    first = np.maximum(0, np.array(LENS) - (600 if name == "window" else 2000))
    blocks = int((-(-np.array(LENS) // 16) - first // 16).sum())
    total = blocks * block_bytes(paged)
    assert told[-1] == (total, total)
    assert len(told) > 5
    done = [numbers[0] for numbers in told]
    assert done == sorted(done)
    assert {numbers[1] for numbers in told} == {total}
    assert all(number % block_bytes(paged) == 0 for number in done)
    assert all(type(number) is int for number in done)


def test_an_error_of_the_one_who_is_told_is_raised(monkeypatch):
    monkeypatch.setattr(streamer, "_REPORT_SECONDS", 0.001)
    seqs, paged, _ = case("plain")
    source = Watched(array_source(paged), lambda number, ids: time.sleep(0.002))
    error = FaultError()

    def fail(done, total):
        raise error

    with Streamer(9) as made:
        assert check_untouched(made, FaultError, seqs, paged, source, progress=fail) is error


@pytest.mark.parametrize("wanted", [True, False])
def test_a_bar_is_shown_where_it_is_asked_for(monkeypatch, wanted):
    shown = []

    class Bar:
        def __init__(self, **options):
            self.n, self.options = 0, options
            shown.append(self)

        def __enter__(self):
            return self

        def __exit__(self, *error):
            self.closed = True

        def update(self, more):
            self.n += more

    monkeypatch.setitem(sys.modules, "tqdm", types.ModuleType("tqdm"))
    sys.modules["tqdm"].tqdm = Bar
    seqs, paged, expected = case("plain")
    answer = stream(seqs, paged, resident_blocks=120, progress=wanted)
    check_same(seqs, answer, expected)
    assert len(shown) == wanted
    for bar in shown:
        assert bar.closed
        assert bar.n == bar.options["total"] == 106 * block_bytes(paged)
