"""The input contract: every message is raised and says what it should, and nothing is written."""

from __future__ import annotations

import ast
import importlib
import inspect
import pathlib
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
from _arguments import BF16, D, Dv, Hq, S, unaligned, valid
from _wrong import CASES

import numba_attn
from numba_attn import AttentionState, _device, _validate

NAMES = ("_arrays", "_device", "_run", "_threads", "_validate", "_validate_options")
NAMES += ("_stream_call", "_validate_state", "api", "sources", "state")
MODULES = [importlib.import_module(f"numba_attn.{name}") for name in NAMES]


@pytest.fixture(autouse=True)
def pretend(monkeypatch):
    """Let fakes pass for device arrays, and a machine without CUDA say so."""
    monkeypatch.setattr(_device, "as_device_array", lambda array: array)
    monkeypatch.setattr(_device, "cuda_problem", lambda: None)


def changed(function, changes):
    """Return the valid arguments of a function with the changes."""
    given = valid(function)
    changes = dict(changes)
    arguments = given | changes.pop("several", lambda _: {})(SimpleNamespace(**given))
    for name, change in changes.items():
        arguments[name] = change(SimpleNamespace(**given)) if callable(change) else change
    return arguments


def target(function):
    found = numba_attn
    for name in function.split("."):
        found = getattr(found, name)
    return found


def call(function, arguments):
    return target(function)(**arguments)


def contents(arguments):
    """Copy the bytes of all arrays and states (but for a view that repeats a few bytes)."""
    arrays = {n: a.buffer if isinstance(a, AttentionState) else a for n, a in arguments.items()}
    return {
        name: array.tobytes()
        for name, array in arrays.items()
        if isinstance(array, np.ndarray) and array.size < 2**20
    }


def error_of(function, changes, monkeypatch):
    """Call with wrong arguments; return the error, and check that no array has changed."""
    if str(changes.get("device")) == "cuda":
        monkeypatch.setattr(_device, "cuda_problem", lambda: "no driver here")
    for name in [name for name in changes if name.isupper()]:
        monkeypatch.setenv(name, changes[name])
    arguments = changed(function, {name: changes[name] for name in changes if not name.isupper()})
    before = contents(arguments)
    with pytest.raises((ValueError, TypeError, RuntimeError)) as caught:
        call(function, arguments)
    assert contents(arguments) == before
    return caught.value


@pytest.mark.parametrize(
    ("function", "changes", "error", "text"), CASES, ids=lambda value: str(value)[:40]
)
def test_message(function, changes, error, text, monkeypatch):
    raised = error_of(function, changes, monkeypatch)
    assert type(raised) is error
    assert text in str(raised)


@pytest.mark.parametrize("function", sorted({case[0] for case in CASES}))
def test_the_unchanged_arguments_are_valid(function):
    call(function, valid(function))


def raises_in(module):
    """List the `raise` statements of a module as (file, first line, last line)."""
    path = pathlib.Path(module.__file__)
    return {
        (path.name, node.lineno, node.end_lineno)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Raise)
    }


def raised_at(error):
    """Say where in the package an error was raised: (file, line)."""
    frames, trace = [], error.__traceback__
    while trace is not None:
        frames.append((pathlib.Path(trace.tb_frame.f_code.co_filename).name, trace.tb_lineno))
        trace = trace.tb_next
    names = {pathlib.Path(module.__file__).name for module in MODULES}
    return [frame for frame in frames if frame[0] in names][-1]


def test_every_raise_of_the_package_has_a_case(monkeypatch):
    reached = set()
    for function, changes, *_ in CASES:
        with monkeypatch.context() as patch:
            reached.add(raised_at(error_of(function, changes, patch)))
    statements = set().union(*map(raises_in, MODULES))
    missed = {
        (file, first)
        for file, first, last in statements
        if not any(at == file and first <= line <= last for at, line in reached)
    }
    assert not missed
    assert len(statements) >= 40  # the walk sees them


def test_every_message_names_the_argument_what_came_and_what_to_do(monkeypatch):
    for function, changes, error, _ in CASES:
        if error is RuntimeError:
            continue
        with monkeypatch.context() as patch:
            message = str(error_of(function, changes, patch))
        name, rest = message.split(": ", 1)
        arguments = set(inspect.signature(target(function)).parameters)
        if "options" in arguments:  # passed on
            arguments |= set(inspect.signature(target("Streamer.attend")).parameters)
        assert name.split(".")[0] in {*arguments, *changes, "all arrays must be on one device"}
        assert "got" in rest or "on the host" in rest
        assert name == "device" or len(rest.split("; ", 1)[1]) > 5


def same(function, **changes):
    """Assert that changes give the bits of the valid arguments."""
    plain, other = valid(function), valid(function) | changes
    call(function, plain)
    call(function, other)
    result = "state" if function == "step_tile" else "out"
    assert contents(plain)[result] == contents(other)[result]


@pytest.mark.parametrize("unused", [-1, 2147480000, 2**31, 2**40, -(2**63)])
def test_unused_entries_may_be_anything(unused):
    tables = np.array([[3, 1, 4, unused], [0, 2, unused, unused]])
    same("paged_attention", block_tables=tables)
    same("step_tile", tile_blocks=tables)


def test_unused_entries_of_uint64_may_be_anything():
    tables = np.array([[3, 1, 4], [0, 2, 2**64 - 1]], np.uint64)
    same("paged_attention", block_tables=tables)
    same("step_tile", tile_blocks=tables)


@pytest.mark.parametrize("dtype", [*"bBhHiIqQ", ">i4", ">u8"])
def test_any_integer_dtype(dtype):
    tables = np.array([[3, 1, 4], [0, 2, 0]], dtype)
    same("paged_attention", block_tables=tables, seq_lens=np.array([9, 5], dtype))
    counts, tokens = np.array([3, 2], dtype), np.array([12, 8], dtype)
    same("step_tile", tile_blocks=tables, tile_block_counts=counts, tile_token_counts=tokens)


@pytest.mark.parametrize("kind", [list, tuple, range])
def test_lists_of_ints(kind):
    lens = range(9, 4, -4) if kind is range else kind([9, 5])
    same("paged_attention", block_tables=[[3, 1, 4], (0, 2, -1)], seq_lens=lens)
    same("step_tile", tile_blocks=[[3, 1, 4], (0, 2, 99)], tile_block_counts=[3, 2])


def test_unaligned_tables():
    given = valid("paged_attention")
    tables, lens = (unaligned(given[name]) for name in ("block_tables", "seq_lens"))
    tables[:], lens[:] = given["block_tables"], given["seq_lens"]
    same("paged_attention", block_tables=tables, seq_lens=lens)


@pytest.mark.parametrize("kind", [int, Fraction, np.float16, np.float32, np.int8, BF16.type])
def test_any_real_scale(kind):
    given, plain = valid("paged_attention"), valid("paged_attention")
    call("paged_attention", given | {"scale": kind(2)})
    call("paged_attention", plain | {"scale": 2.0})
    assert contents(given) == contents(plain)
    assert contents(given) != contents(valid("paged_attention"))


def test_out_may_lie_beside_q_in_one_buffer():
    given = valid("paged_attention")
    packed = np.full((S, Hq, D + Dv + 3), 9, BF16)  # q, out, and something else
    packed[:, :, :D] = given["q"]
    same("paged_attention", q=packed[:, :, :D], out=packed[:, :, D : D + Dv])
    assert (packed[:, :, :D] == given["q"]).all()
    assert (packed[:, :, D + Dv :] == 9).all()


def test_an_overlap_that_is_too_hard_to_decide_is_refused(monkeypatch):
    """The exact search is exponential at worst, so its steps are bounded."""
    memory = np.zeros(2**10, np.int8)
    one = np.lib.stride_tricks.as_strided(memory, (4, 5), (40, 55))
    two = np.lib.stride_tricks.as_strided(memory[29:], (5, 3), (32, 38))
    assert not _validate.overlap(one, two)
    monkeypatch.setattr(_validate, "_OVERLAP_WORK", 1)
    assert _validate.overlap(one, two)


def test_sizes_may_be_small_numpy_ints():
    state = AttentionState(np.int8(100), np.int8(100), np.int8(3))
    assert state.buffer.size == 100 * 100 * 5
    assert state.o.shape == (100, 100, 3)


def test_a_block_size_beyond_all_integers():
    """count * B passes 64 bits; what is legal stays legal."""
    pool = np.lib.stride_tricks.as_strided(np.ones(1, np.uint16), (1, 2**60, 1, 1), (0, 0, 0, 2))
    q, state = np.ones((1, 1, 1), np.uint16), AttentionState(1, 1, 1)
    table = np.zeros((1, 16), np.int32)
    for counts in ([16], [8]):
        with pytest.raises(ValueError, match="tile_block_counts: must be from 0 to the largest"):
            numba_attn.step_tile(state, q, pool, pool, table, counts)
        numba_attn.step_tile(state, q, pool, pool, table, counts, tile_token_counts=[5])
    np.testing.assert_array_equal(state.l, 10)
