"""Threads and processes that use a streamer, and the threads that it leaves: none."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from _process import needs_fork, run
from _streaming import (
    PATIENCE,
    Watched,
    array_source,
    attend_with,
    case,
    check_same,
    layers_of,
    readers,
    stream,
)

from numba_attn import Streamer


def test_callers_at_once_take_turns():
    layers, paged, expected = layers_of(4)
    sources = [array_source(one) for one in paged]
    gate = threading.Barrier(4)

    def work(i):
        gate.wait()
        for turn in range(8):
            j = (i + turn) % 4
            following = (sources[i], *paged[i][2:]) if turn % 3 else None
            answer = attend_with(streamer, layers[j], paged[j], sources[j], then=following)
            check_same(layers[j], answer, expected[j])

    with Streamer(100) as streamer, ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


def test_a_closed_streamer_begins_anew():
    seqs, paged, expected = case("plain")
    before = readers()
    streamer = Streamer(120)
    for _ in range(2):
        source = array_source(paged)
        answer = attend_with(streamer, seqs, paged, source, then=(source, *paged[2:]))
        check_same(seqs, answer, expected)
        assert len(readers() - before) == 3
        streamer.close()
        streamer.close()
        assert readers() <= before


def test_a_call_leaves_no_thread():
    before = readers()
    seqs, paged, _ = case("plain")
    stream(seqs, paged)
    assert readers() <= before


def test_a_streamer_that_is_forgotten_leaves_no_thread():
    before = readers()
    seqs, paged, _ = case("plain")
    streamer = Streamer(4)
    source = array_source(paged)
    attend_with(streamer, seqs, paged, source, then=(source, *paged[2:]))
    left = readers() - before
    assert left
    del streamer
    for thread in left:
        thread.join(PATIENCE)
        assert not thread.is_alive()


CALLS = """
import warnings
import numba_attn, _cases, _process, _streaming
warnings.simplefilter("ignore")  # Python warns of a fork with threads: that is the point
seqs = _cases.draw((1100, 0, 33, 530), num_kv_heads=2)
paged = _cases.place(seqs, 16)
source = _streaming.array_source(paged)
streamer = numba_attn.Streamer(9)

def bits():
    following = {"then": (source, *paged[2:])}
    out, lse = _streaming.attend_with(streamer, seqs, paged, source, **following)
    return out.tobytes() + lse.tobytes()

before = bits()
"""


@needs_fork
def test_a_streamer_in_a_forked_child_and_its_child():
    run(CALLS + "_process.check_forks(bits, streamer.close)")


def test_a_streamer_ends_with_the_interpreter():
    """Neither its threads nor tiles read ahead keep a process alive."""
    run(CALLS)


@pytest.mark.parametrize("use", ["attend", "close"])
@pytest.mark.parametrize("where", ["read", "progress"])
def test_a_call_that_waits_for_itself_is_an_error(use, where):
    seqs, paged, _ = case("plain")

    def again(*_):
        streamer.close() if use == "close" else attend_with(streamer, seqs, paged)

    source, options = array_source(paged), {}
    if where == "read":
        source = Watched(source, again)
    else:
        options = {"progress": again}
    with Streamer(9) as streamer, pytest.raises(RuntimeError, match="Streamer: is in a call"):
        attend_with(streamer, seqs, paged, source, **options)
