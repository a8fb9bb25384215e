"""Nothing is read before all arguments of a stream have been checked."""

import re
import sys
from types import SimpleNamespace

import _arguments as make
import numpy as np
import pytest
from _cases import BFLOAT16
from _streaming import (
    Watched,
    array_source,
    case,
    check_same,
    readers,
    stream,
)
from _wrong_stream import STREAM

import numba_attn
from numba_attn import AttentionState, Streamer, _stream_progress

pytestmark = pytest.mark.usefixtures("no_reader_is_left")


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


def test_a_bar_without_tqdm_is_an_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    check_refused({"progress": True}, ImportError, r"progress: True needs tqdm; install")
    assert _stream_progress.check(None) is None
