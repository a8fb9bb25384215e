"""The input contract: every message is raised and says what it should, and nothing is written."""

from __future__ import annotations

import ast
import pathlib
from types import SimpleNamespace

import numpy as np
import pytest
from _arguments import valid
from _wrong import CASES

import numba_attn
from numba_attn import AttentionState, _arrays, _device, _threads, _validate, api, state

MODULES = (_arrays, _device, _threads, _validate, api, state)


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


def call(function, arguments):
    target = numba_attn
    for name in function.split("."):
        target = getattr(target, name)
    return target(**arguments)


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
    if changes.get("device") == "cuda":
        monkeypatch.setattr(_device, "cuda_problem", lambda: "no driver here")
    arguments = changed(function, changes)
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
        if error is RuntimeError or function == "set_num_threads":
            continue
        with monkeypatch.context() as patch:
            message = str(error_of(function, changes, patch))
        name, rest = message.split(": ", 1)
        assert name in {*valid(function), *changes, "all arrays must be on one device"}
        assert "got" in rest or "on the host" in rest
        assert name == "device" or len(rest.split("; ", 1)[1]) > 5
