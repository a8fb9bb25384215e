"""Streams that fail: the error itself is raised, nothing was written, the next call works."""

import threading
import time

import numpy as np
import pytest
from _process import run
from _streaming import (
    PATIENCE,
    TILES,
    FaultError,
    Watched,
    array_source,
    attend_with,
    case,
    check_same,
    check_untouched,
    fail_at,
    file_of,
    layers_of,
    stream,
)

import numba_attn
from numba_attn import Streamer, _stage_cpu
from numba_attn._stream_call import Keys

pytestmark = pytest.mark.usefixtures("no_reader_is_left")


# 1. Errors of the source


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("number", [0, 1, 5, TILES - 1])
def test_what_a_read_raises_is_raised(number, prefetch):
    seqs, paged, _ = case("plain")
    error = FaultError()
    source = Watched(array_source(paged), fail_at(number, error))
    with Streamer(3 * (prefetch + 1), prefetch) as streamer:
        assert check_untouched(streamer, FaultError, seqs, paged, source) is error
        # At most the other threads were in a read, too.
        assert number < len(source.reads) <= number + 1 + 2 * prefetch


@pytest.mark.parametrize(
    "kind", [OSError, KeyError, StopIteration, SystemExit, KeyboardInterrupt, GeneratorExit]
)
def test_any_exception_is_raised(kind):
    seqs, paged, _ = case("plain")
    error = kind("text")
    source = Watched(array_source(paged), fail_at(4, error))
    with Streamer(9) as streamer:
        assert check_untouched(streamer, kind, seqs, paged, source) is error


def test_one_of_several_errors_is_raised():
    seqs, paged, _ = case("plain")
    gate = threading.Barrier(3, timeout=PATIENCE)
    raised = []

    def fail_together(number, ids):
        gate.wait()
        raised.append(FaultError(number))
        raise raised[-1]

    source = Watched(array_source(paged), fail_together)
    with Streamer(9) as streamer:
        error = check_untouched(streamer, FaultError, seqs, paged, source)
        assert any(error is one for one in raised)
        assert len(source.reads) == 3


@pytest.mark.parametrize("found", [0, 2, 4, -1])
def test_a_read_that_is_short_is_an_error(found):
    seqs, paged, _ = case("plain")
    source = Watched(array_source(paged))
    read = source.read
    source.read = lambda ids, k, v: read(ids, k, v) or found
    with Streamer(9) as streamer:
        error = check_untouched(streamer, OSError, seqs, paged, source)
    texts = (
        f"read {found} of {len(ids)} blocks, from {ids[0]} to {ids[-1]};" for ids in source.reads
    )
    assert any(text in str(error) for text in texts)


def test_a_read_that_returns_what_it_has_read_is_an_error():
    seqs, paged, _ = case("plain")
    source = Watched(array_source(paged))
    read = source.read
    source.read = lambda ids, k, v: read(ids, k, v) or (k, v)
    with Streamer(9) as streamer:
        error = check_untouched(streamer, TypeError, seqs, paged, source)
    assert "source.read: expected None or the number of blocks that were read, got tuple" in str(
        error
    )


def test_a_read_that_tells_its_number_is_right():
    seqs, paged, expected = case("plain")
    source = Watched(array_source(paged))
    read = source.read
    source.read = lambda ids, k, v: read(ids, k, v) or np.int64(len(ids))
    check_same(seqs, stream(seqs, paged, source, resident_blocks=120), expected)


@pytest.mark.parametrize("prefetch", [1, 3])
def test_reads_that_end_in_another_order_change_no_bit(prefetch):
    seqs, paged, expected = case("plain")
    rng = np.random.default_rng(5)
    pauses = rng.choice([0, 0, 0.001, 0.004], 200).tolist()
    whole = Watched(array_source(paged), lambda number, ids: time.sleep(pauses[number]))
    check_same(seqs, stream(seqs, paged, whole, resident_blocks=32 * (1 + prefetch)), expected)
    answers = []
    for before in (whole.before, lambda number, ids: None):
        source = Watched(array_source(paged), before)
        room = {"resident_blocks": 3 * (1 + prefetch), "prefetch": prefetch}
        answers.append(stream(seqs, paged, source, **room))
    check_same(seqs, *answers)


def test_a_file_that_is_closed_meanwhile_is_an_error(tmp_path):
    seqs, paged, _ = case("plain")

    def close(number, ids):
        if number == 4:
            closer = threading.Thread(target=file.close)
            closer.start()
            closer.join()

    with file_of(paged, folder=tmp_path) as file, Streamer(9) as streamer:
        source = Watched(file.layer(0), close)
        check_untouched(streamer, (OSError, ValueError), seqs, paged, source)


def test_a_damaged_block_is_an_error(tmp_path):
    seqs, paged, _ = case("plain")
    block = int(paged.block_tables[0, 40])
    with file_of(paged, folder=tmp_path, checksum=True) as file, Streamer(9) as streamer:
        layer = file.layer(0)
        raw = np.memmap(layer.path, np.uint8, "r+", offset=4096)
        raw.reshape(len(paged.k_pool), -1)[block, 77] ^= 1
        damaged = numba_attn.kv_file.DamagedBlockError
        error = check_untouched(streamer, damaged, seqs, paged, layer)
        assert f"block {block} of layer 0" in str(error)


def test_an_error_of_the_arithmetic_is_raised(monkeypatch):
    seqs, paged, _ = case("plain")
    absorb, error, calls = _stage_cpu.OnCpu.absorb, FaultError(), []

    def fail(*arguments):
        calls.append(arguments)
        if len(calls) == 7:
            raise error
        return absorb(*arguments)

    monkeypatch.setattr(_stage_cpu.OnCpu, "absorb", fail)
    with Streamer(9) as streamer:
        assert check_untouched(streamer, FaultError, seqs, paged, array_source(paged)) is error


def test_a_streamer_without_memory_for_its_room_raises():
    seqs, paged, _ = case("plain")
    with Streamer(1 << 46) as streamer:
        source = Watched(array_source(paged))
        with pytest.raises((MemoryError, ValueError)):
            attend_with(streamer, seqs, paged, source)
        assert source.reads == []


# 2. What was begun for the next call


def test_an_error_of_the_next_source_is_raised_by_the_call_that_asks_for_it():
    layers, paged, expected = layers_of(2)
    error, failed = FaultError(), threading.Event()

    def fail(number, ids):
        failed.set()
        raise error

    source = Watched(array_source(paged[1]), fail)
    with Streamer(120) as streamer:
        following = (source, *paged[1][2:])
        answer = attend_with(streamer, layers[0], paged[0], then=following)
        check_same(layers[0], answer, expected[0])
        assert failed.wait(PATIENCE)
        with pytest.raises(FaultError) as caught:
            attend_with(streamer, layers[1], paged[1], source)
        assert caught.value is error
        source.before = lambda number, ids: None
        check_same(layers[1], attend_with(streamer, layers[1], paged[1], source), expected[1])


def test_an_error_of_a_source_that_is_not_asked_for_again_is_no_ones():
    layers, paged, expected = layers_of(2)
    failed = threading.Event()

    def fail(number, ids):
        failed.set()
        raise FaultError

    source = Watched(array_source(paged[1]), fail)
    with Streamer(120) as streamer:
        for _ in range(2):
            following = (source, *paged[1][2:])
            answer = attend_with(streamer, layers[0], paged[0], then=following)
            check_same(layers[0], answer, expected[0])
            assert failed.wait(PATIENCE)


def test_an_error_takes_what_was_begun_with_it():
    """The next layer is read again, from its first tile on."""
    layers, paged, expected = layers_of(2)
    seqs, following = layers[0], Watched(array_source(paged[1]))
    source = Watched(array_source(paged[0]), fail_at(TILES - 1, FaultError()))
    with Streamer(9) as streamer:
        check_untouched(
            streamer, FaultError, seqs, paged[0], source, then=(following, *paged[1][2:])
        )
        begun = len(following.reads)
        answer = attend_with(streamer, layers[1], paged[1], following)
        check_same(layers[1], answer, expected[1], bits=False)
        assert len(following.reads) == begun + TILES


def test_an_error_before_the_first_tile_leaves_all_buffers():
    run(
        "import test_stream_faults; test_stream_faults.fail_before_the_first_tile()",
        timeout=PATIENCE,
    )


def fail_before_the_first_tile():
    layers, paged, expected = layers_of(2)
    before = [threading.Event() for _ in range(3)]
    source = Watched(array_source(paged[1]), lambda number, ids: before[number % 3].set())
    compared, arguments = Keys.are_cut_as, (layers[1], paged[1], source)

    def fail(keys, others):
        raise FaultError

    with Streamer(96) as streamer:
        following = (source, *paged[1][2:])
        attend_with(streamer, layers[0], paged[0], then=following)
        for event in before:
            assert event.wait(PATIENCE)
        Keys.are_cut_as = fail
        with pytest.raises(FaultError):
            attend_with(streamer, *arguments)
        Keys.are_cut_as = compared
        check_same(layers[1], attend_with(streamer, *arguments), expected[1])


def test_what_was_begun_is_stopped_with_the_streamer():
    """Also while it is being read."""
    layers, paged, _ = layers_of(2)
    reading, go_on = threading.Event(), threading.Event()

    def wait(number, ids):
        reading.set()
        assert go_on.wait(PATIENCE)

    source = Watched(array_source(paged[1]), wait)
    with Streamer(9) as streamer:
        attend_with(streamer, layers[0], paged[0], then=(source, *paged[1][2:]))
        assert reading.wait(PATIENCE)
        closer = threading.Thread(target=streamer.close)
        closer.start()
        go_on.set()
        closer.join(PATIENCE)
        assert not closer.is_alive()
    assert len(source.reads) <= 3
