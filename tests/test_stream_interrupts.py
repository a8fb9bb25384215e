"""Streams that are interrupted: no thread is left, and the next call works."""

import itertools
import signal
import sys
import threading
import time

import numpy as np
import pytest
from _process import run
from _streaming import (
    PATIENCE,
    TILES,
    Watched,
    array_source,
    attend_with,
    case,
    check_same,
    check_untouched,
    layers_of,
    readers,
)

from numba_attn import Streamer, streamer

pytestmark = pytest.mark.usefixtures("no_reader_is_left")


def interrupt():
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


needs_signals = pytest.mark.skipif(
    not hasattr(signal, "pthread_kill"), reason="this system sends no signal to a thread"
)


@pytest.fixture
def interruptible():
    """Let SIGINT raise, also where the suite runs in the background: there it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def wait_for_the_wait():
    """Return when the main thread waits for the end of a job."""
    while True:
        frame = sys._current_frames()[threading.main_thread().ident]
        while frame is not None:
            if frame.f_code is streamer._wait.__code__:
                return
            frame = frame.f_back
        time.sleep(0.001)


@needs_signals
@pytest.mark.parametrize("number", [0, 3, 30])
@pytest.mark.parametrize("progress", [None, lambda done, total: None])
def test_ctrl_c_ends_the_call_and_its_threads(interruptible, number, progress):
    seqs, paged, _ = case("plain")

    def be_interrupted(at, ids):
        if at == number:
            wait_for_the_wait()
            interrupt()
        if at >= number:
            time.sleep(0.01)  # the other reads are slower than a signal

    source = Watched(array_source(paged), be_interrupted)
    with Streamer(9) as streamer:
        options = {"then": (source, *paged[2:]), "progress": progress}
        check_untouched(streamer, KeyboardInterrupt, seqs, paged, source, **options)
        assert len(source.reads) < TILES


@needs_signals
def test_after_a_ctrl_c_at_any_moment_the_next_call_works():
    """Where it comes while a thread is being started, Python forgets that one; it ends, too."""
    run(
        "import test_stream_interrupts; test_stream_interrupts.interrupt_at_any_moment()",
        timeout=PATIENCE,
    )


def interrupt_at_any_moment():
    signal.signal(signal.SIGINT, signal.default_int_handler)
    layers, paged, expected = layers_of(2)
    sources = [array_source(one) for one in paged]
    calls = itertools.cycle(range(2))
    with Streamer(9) as streamer:
        for delay in np.linspace(0, 0.008, 40):
            timer = threading.Timer(delay, interrupt)
            try:
                timer.start()
                while timer.is_alive():  # Python may lose an interrupt, in a callback of its own
                    i = next(calls)
                    following = (sources[1 - i], *paged[1 - i][2:])
                    attend_with(streamer, layers[i], paged[i], sources[i], then=following)
            except KeyboardInterrupt:
                pass
            timer.join()
        answer = attend_with(streamer, layers[0], paged[0], sources[0])
        check_same(layers[0], answer, expected[0], bits=False)
    for thread in readers():
        if thread.ident is not None:  # else Python was interrupted before it had started
            thread.join()


@needs_signals
def test_ctrl_c_while_another_thread_has_its_turn(interruptible):
    """Whoever waits for the streamer is interrupted alone."""
    layers, paged, expected = layers_of(2)
    reading, go_on = threading.Event(), threading.Event()

    def wait(number, ids):
        reading.set()
        assert go_on.wait(PATIENCE)

    source, found = Watched(array_source(paged[1]), wait), []
    with Streamer(120) as streamer:

        def work():
            found.append(attend_with(streamer, layers[1], paged[1], source))

        other = threading.Thread(target=work)
        other.start()
        assert reading.wait(PATIENCE)
        timer = threading.Timer(0.05, interrupt)
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            attend_with(streamer, layers[0], paged[0])
        timer.join()
        go_on.set()
        other.join()
        check_same(layers[1], found[0], expected[1])
        check_same(layers[0], attend_with(streamer, layers[0], paged[0]), expected[0])
