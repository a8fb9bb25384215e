"""Streams that fail: the error itself is raised, nothing has been written, and the next call works.

Nothing is read before all arguments have been checked.
"""

import itertools
import re
import signal
import sys
import threading
import time
import types
from types import SimpleNamespace

import _arguments as make
import numpy as np
import pytest
from _cases import BFLOAT16
from _process import run
from _streaming import (
    LENS,
    PATIENCE,
    Watched,
    array_source,
    attend_with,
    case,
    check_same,
    file_of,
    layers_of,
    readers,
    stream,
)
from _wrong_stream import STREAM

import numba_attn
from numba_attn import AttentionState, Streamer, _stage_cpu, _stream_progress, streamer
from numba_attn._stream_call import Keys

TILES = 37  # with room for 3 blocks each, of all blocks of LENS


class FaultError(Exception):
    pass


@pytest.fixture(autouse=True)
def no_reader_is_left():
    before = readers()
    yield
    assert readers() <= before


def fail_at(number, error):
    """Return what lets a source fail at its n-th read."""

    def before(at, ids):
        if at == number:
            raise error

    return before


def check_untouched(streamer, error, seqs, paged, source, **options):
    """Check that a call fails, and that it writes nothing and leaves no thread; return the error.

    Then the streamer is as good as new.
    """
    state = AttentionState.like(seqs.q, paged.v_pool)
    state.buffer[:] = np.arange(state.buffer.size)
    out = np.full((*seqs.q.shape[:-1], paged.v_pool.shape[3]), 7, seqs.q.dtype)
    arrays = seqs.q, paged.block_tables, paged.seq_lens, out, state.buffer
    contents = [array.tobytes() for array in arrays]
    threads = readers()
    with pytest.raises(error) as caught:
        attend_with(streamer, seqs, paged, source, state=state, out=out, **options)
    assert [array.tobytes() for array in arrays] == contents
    assert not readers() - threads
    again, expected = attend_with(streamer, seqs, paged), case("plain")[2]
    check_same(seqs, again, expected, bits=False)
    return caught.value


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


# 3. Interrupts


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
    run("import test_stream_faults; test_stream_faults.interrupt_at_any_moment()", timeout=PATIENCE)


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


# 4. Progress


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


def test_a_bar_without_tqdm_is_an_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    check_refused({"progress": True}, ImportError, r"progress: True needs tqdm; install")
    assert _stream_progress.check(None) is None


# 5. Wrong arguments: nothing is read


def valid():
    """Return the arguments of a call that gives all there is."""
    seqs, paged, _ = case("plain")
    state = AttentionState.like(seqs.q, paged.v_pool)
    source = Watched(array_source(paged))
    return {
        "q": seqs.q,
        "source": source,
        "block_tables": paged.block_tables,
        "seq_lens": paged.seq_lens,
        "state": state,
        "then": (Watched(array_source(paged)), *paged[2:]),
        "out": np.full(seqs.q.shape, 7, BFLOAT16),
        "return_lse": True,
    }


def check_refused(changes, error, text):
    """Check that changed arguments are refused before anything is read or written."""
    arguments = valid()
    sources = arguments["source"], arguments["then"][0]
    given = SimpleNamespace(**arguments)
    kept = {n: x.buffer if n == "state" else x for n, x in arguments.items() if n in WRITTEN}
    contents = {name: array.tobytes() for name, array in kept.items()}
    for name, change in changes.items():
        arguments[name] = change(given) if callable(change) else change
    if isinstance(arguments["source"], Watched):
        sources += (arguments["source"],)
    with Streamer(9) as streamer:
        with pytest.raises(error, match=text):
            streamer.attend(**arguments)
        assert not readers()
    assert {name: array.tobytes() for name, array in kept.items()} == contents
    assert [source.reads for source in sources] == [[]] * len(sources)


WRITTEN = ("q", "state", "out", "block_tables", "seq_lens")


def table_with(value, dtype=np.int64):
    """Change an id that is in use."""

    def change(given):
        tables = given.block_tables.astype(np.int64)
        tables[3, 2] = value
        return tables.astype(dtype)

    return change


def source_with(**changes):
    def change(given):
        source = Watched(given.source.source)
        for name, value in changes.items():
            setattr(source, name, value)
        return source

    return change


def then_with(place, value):
    def change(given):
        then = list(given.then)
        then[place] = value(given) if callable(value) else value
        return tuple(then)

    return change


WRONG = {
    "an array": ({"source": lambda g: g.source.source._pools[0]}, TypeError, "wrapped by ArraySo"),
    "an unknown v_dtype": (
        {"source": source_with(v_dtype=np.dtype(np.float64))},
        TypeError,
        "source.v_dtype: expected bfloat16",
    ),
    "a negative id": (
        {"block_tables": table_with(-1)},
        ValueError,
        r"block_tables: ids in use must be from 0 to N - 1 = 107 .*got -1 in row 3, entry 2",
    ),
    "an id past the last": ({"block_tables": table_with(108)}, ValueError, "got 108 in row 3, ent"),
    "an id past int32": ({"block_tables": table_with(2**32)}, ValueError, "got 4294967296 in row"),
    "an id past int32 where no number is known": (
        {"source": source_with(num_blocks=None), "block_tables": table_with(2**31)},
        ValueError,
        "got 2147483648 in row 3, entry 2",
    ),
    "an id that scales by token do not know": (
        {
            "source": source_with(num_blocks=None),
            "k_scale": np.ones((100, 16, 2), np.float32),
            "block_tables": table_with(100),
        },
        ValueError,
        "must be from 0 to N - 1 = 99",
    ),
    "ids of floats": (
        {"block_tables": table_with(1, np.float64)},
        TypeError,
        "block_tables: expected integers",
    ),
    "a negative length": (
        {"seq_lens": [1100, 0, -1, 5]},
        ValueError,
        "seq_lens: must be .* got -1",
    ),
    "lengths of floats": ({"seq_lens": [5.0] * 4}, TypeError, "seq_lens: expected integers"),
    "a first position past the end": (
        {"seq_starts": [0, 1, 0, 0]},
        ValueError,
        "seq_starts: must be from 0 to seq_len = 0, got 1 in row 1",
    ),
    "scales of other blocks": (
        {"v_scale": np.ones((107, 16, 2), np.float32)},
        ValueError,
        r"v_scale: expected a number, \[Hkv\]",
    ),
    "causal 1": ({"causal": 1}, TypeError, "causal: expected True or False"),
    "progress 1": ({"progress": 1}, TypeError, "progress: expected True, False, None or a func"),
    "progress of text": ({"progress": "bar"}, TypeError, "progress: expected True.*got str"),
    "then of one": ({"then": lambda g: g.then[0]}, TypeError, r"then: expected \(source, block_t"),
    "then without a source": ({"then": then_with(0, None)}, TypeError, "source: expected"),
    "then with a bad id": ({"then": then_with(1, table_with(-1))}, ValueError, "got -1 in row 3"),
    "then with bad lengths": (
        {"then": then_with(2, [1] * 3)},
        ValueError,
        "seq_lens: expected sha",
    ),
    "then with an end elsewhere": (
        {"tile_starts": [0, 0, 0, 500], "then": then_with(2, [1100, 0, 33, 499])},
        ValueError,
        "tile_starts: must be from 0 to seq_len = 499",
    ),
    "out of a list": ({"out": [[1]]}, TypeError, "out: expected a NumPy array"),
    "out of another dtype": (
        {"out": lambda g: g.out.astype(np.float32)},
        TypeError,
        "out: expected dtype bfloat16",
    ),
    "out over q": ({"out": lambda g: g.q}, ValueError, "out: must not overlap q"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_arguments_read_nothing(what):
    check_refused(*WRONG[what])


@pytest.mark.parametrize(("changes", "error", "text"), STREAM)
def test_whatever_is_wrong_nothing_is_read(monkeypatch, changes, error, text):
    """The messages are in `test_validate`."""
    reads, given = [], make.valid("stream_attention")
    monkeypatch.setattr(given["source"], "read", lambda *arguments: reads.append(arguments))
    arguments = dict(given)
    given, changes = SimpleNamespace(**given), dict(changes)
    arguments |= changes.pop("several", lambda _: {})(given)
    for name, change in changes.items():
        arguments[name] = change(given) if callable(change) else change
    with pytest.raises(error, match=re.escape(text)):
        numba_attn.stream_attention(**arguments)
    assert reads == []


def test_valid_arguments_are_valid():
    """So that what is wrong above is what has been changed."""
    arguments = valid()
    with Streamer(120) as streamer:
        out, lse = streamer.attend(**arguments)
    check_same(None, (out, lse), case("plain")[2])


@pytest.mark.parametrize(
    ("name", "number", "error"),
    [
        *(("resident_blocks", bad, ValueError) for bad in (0, -3)),
        *(("resident_blocks", bad, TypeError) for bad in (True, 1.5, "9", None)),
        ("prefetch", -1, ValueError),
        *(("prefetch", bad, TypeError) for bad in (False, 0.5, None)),
    ],
)
def test_a_wrong_room_is_refused(name, number, error):
    seqs, paged, _ = case("plain")
    numbers = {"resident_blocks": 9, "prefetch": 1, name: number}
    with pytest.raises(error, match=f"{name}: (expected an integer|must be at least [01]), got"):
        Streamer(**numbers)
    source = Watched(array_source(paged))
    with pytest.raises(error, match=name):
        stream(seqs, paged, source, **numbers)
    assert source.reads == []


@pytest.mark.parametrize("number", [np.int64(9), np.uint8(9)])
def test_a_room_is_any_integer(number):
    streamer = Streamer(number, prefetch=number)
    assert (type(streamer.resident_blocks), type(streamer.prefetch)) == (int, int)


def test_an_unknown_option_is_refused():
    seqs, paged, _ = case("plain")
    source = Watched(array_source(paged))
    with pytest.raises(TypeError, match="windows"):
        stream(seqs, paged, source, windows=3)
    assert source.reads == []
