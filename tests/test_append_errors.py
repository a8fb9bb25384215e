"""The contract of append_kv: one clear error, and nothing written."""

import ast
import pathlib

import ml_dtypes
import numpy as np
import pytest
from _arguments import FakeDeviceArray, every_other_column, one_row_repeated, read_only, unaligned

import numba_attn
from numba_attn import _device, _validate_append

BF16, FP8 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)
T, N, B, Hkv, D, Dv = 3, 5, 4, 2, 8, 6


def valid():
    rng = np.random.default_rng(7)
    return {
        "k": rng.standard_normal((T, Hkv, D)).astype(BF16),
        "v": rng.standard_normal((T, Hkv, Dv)).astype(BF16),
        "k_pool": np.full((N, B, Hkv, D), 3, FP8),
        "v_pool": np.full((N, B, Hkv, Dv), 3, np.int8),
        "slot_mapping": np.array([17, 4, 0]),
        "k_scale": np.full((N, B, Hkv), 0.5, np.float32),
        "v_scale": np.full((N, B, Hkv), 0.5, np.float32),
        "compute_scales": False,
    }


def value(text, several=None, **changes):
    return changes | ({"several": several} if several else {}), ValueError, text


def kind(text, several=None, **changes):
    return changes | ({"several": several} if several else {}), TypeError, text


def bfloat16_pools(given):
    pools = {name: given[name].astype(BF16) for name in ("k_pool", "v_pool")}
    return pools | {"compute_scales": True, "k_scale": None, "v_scale": None}


class DeviceArray(FakeDeviceArray):
    """One of any dtype."""

    def __init__(self, like, dtype=None):
        super().__init__(like, dtype or like.dtype)

    def view(self, dtype):
        return DeviceArray(self, dtype)


def on_device(given, **others):
    arrays = {name: x for name, x in given.items() if isinstance(x, np.ndarray)}
    return {name: DeviceArray(x) for name, x in arrays.items()} | others


def overlapping_pools(given):
    both = np.zeros((N, B, Hkv, D + Dv), FP8)
    return {"k_pool": both[..., :D], "v_pool": both[..., D - 1 : -1]}


def last(array):
    array = array.copy()
    array[4, 1, 1] = -0.5  # slot 17, head 1
    return array


COMPUTED = {"compute_scales": True}
CASES = [
    kind("k: expected a NumPy array or a CUDA array, got list; convert it with", k=[[[1.0]]]),
    kind("v: expected a NumPy array or a CUDA array, got MaskedArray", v=np.ma.ones(3)),
    kind("k: expected dtype bfloat16, float16, float32", k=lambda g: g["k"].astype(np.float64)),
    kind("k: expected dtype bfloat16, float16, float32", k=lambda g: g["k"].astype(np.int8)),
    kind("k: expected dtype bfloat16, float16, float32", k=lambda g: g["k"].astype(FP8)),
    kind("v_pool: expected dtype bfloat16", v_pool=lambda g: g["v_pool"].view(np.uint8)),
    value("k: expected 3 axes [T, Hkv, D], got shape (2, 8); reshape", k=lambda g: g["k"][0]),
    value("k_pool: expected 4 axes [N, B, Hkv, D], got", k_pool=lambda g: g["k_pool"][0]),
    value("v: expected 3 axes [T, Hkv, Dv], got shape (3, 2, 6, 1)", v=lambda g: g["v"][..., None]),
    value("k: the last axis of [T, Hkv, D] must be", k=lambda g: every_other_column(g["k"])),
    value("v_pool: the last axis of [N", v_pool=lambda g: every_other_column(g["v_pool"])),
    value("k: the data must be aligned to 2 bytes", k=lambda g: unaligned(g["k"])),
    value(
        "k: expected shape [T, Hkv, D] with Hkv, D = (2, 8) as in k_pool, got (3, 2, 7); check",
        k=lambda g: g["k"][..., :7],
    ),
    value(
        "v: expected shape [T, Hkv, Dv] with Hkv, Dv = (2, 6) as in v_pool, got (3, 1, 6); check",
        v=lambda g: g["v"][:, :1],
    ),
    value("v: its first axis must be T = 3, that of k, got 2; pass", v=lambda g: g["v"][:2]),
    value(
        "v_pool: its first three axes [N, B, Hkv] must be those of k_pool, (5, 4, 2), got (4, 4, "
        "2); a head-major pool is passed as a transposed view",
        v_pool=lambda g: g["v_pool"][:4],
    ),
    value(
        "v: v and v_pool must be given together, got v_pool and v_scale alone; pass both, or None",
        v=None,
    ),
    value("must be given together, got v and v_scale alone; pass both, or", v_pool=None),
    value("must be given together, got v_scale alone", v=None, v_pool=None),
    kind("slot_mapping: expected integers (int32), got float64", slot_mapping=np.ones(T)),
    kind("slot_mapping: expected integers (int32), got object", slot_mapping=None),
    kind("slot_mapping: expected integers (int32), got bool", slot_mapping=[True, False, True]),
    value(
        "slot_mapping: expected shape [T] = (3,), one slot per token of k, got (2,); pass -1 for a",
        slot_mapping=[3, 4],
    ),
    value("slot_mapping: expected shape [T] = (3,)", slot_mapping=[[3], [4], [5]]),
    value("slot_mapping: expected shape [T] = (3,)", slot_mapping=7),
    *(
        value(
            f"slot_mapping: must be from 0 to N * B - 1 = 19, or -1 to skip, got {slot} for token "
            "1; a slot is block * B + place in the block",
            slot_mapping=np.array([0, slot, 3], dtype),
        )
        for slot, dtype in [
            *((20, "u1"), (-2, "i1"), (2**32, "i8"), (-(2**63), "i8")),
            *((2**64 - 1, "u8"), (2**63, "u8"), (2**31, ">u4")),
        ]
    ),
    value(
        "slot_mapping: each slot may come once, got 6 for tokens 0 and 2; pass -1 for the one that",
        slot_mapping=[6, -1, 6],
    ),
    value("k_pool: must be writable, got a read-only", k_pool=lambda g: read_only(g["k_pool"])),
    value("v_pool: must be writable, got a read-only", v_pool=lambda g: read_only(g["v_pool"])),
    value("k_pool: its elements must lie", k_pool=lambda g: one_row_repeated(g["k_pool"])),
    value("k_pool: must not overlap v_pool, got a view of its memory", overlapping_pools),
    value("v_pool: must not overlap k_scale", lambda g: scale_over_the_pool(g, "k_scale")),
    value("k_pool: must not overlap k, got a view", lambda g: {"k_pool": pool_over(g, "k")}),
    kind("k_scale: expected a real number or None, got complex; pass a float", k_scale=1j),
    kind("k_scale: expected floats (float32), got <U1; convert it with .astype", k_scale=["1"]),
    value("k_scale: must be positive and finite in float32, got 0.0", k_scale=0),
    value(
        "k_scale: expected a number, [Hkv] = (2,) or [N, B, Hkv] = (5, 4, 2), got shape (3,); pass",
        k_scale=np.ones(3),
    ),
    value(
        "k_scale: must be positive and finite where a token is written, got 0.0; stored value x",
        k_scale=[1.0, 0.0],
    ),
    value("where a token is written, got inf; stored", v_scale=np.array([np.inf, 1.0])),
    value("where a token is written, got nan; stored", v_scale=np.array([np.nan, 1.0])),
    value("k_scale: must be positive and finite where", k_scale=lambda g: last(g["k_scale"])),
    kind("compute_scales: expected True or False, got int", compute_scales=1),
    value(
        "compute_scales: needs a pool of float8_e4m3fn, float8_e5m2, int8, got bfloat16, bfloat16;",
        bfloat16_pools,
    ),
    value(
        "k_scale: none is computed for a pool of bfloat16, got ndarray; pass None",
        k_pool=lambda g: g["k_pool"].astype(BF16),
        **COMPUTED,
    ),
    kind(
        "k_scale: with compute_scales, expected a float32 array to write to, got NoneType; alloc",
        k_scale=None,
        **COMPUTED,
    ),
    kind("to write to, got float; allocate it", v_scale=0.5, **COMPUTED),
    kind("to write to, got float64", k_scale=np.ones((N, B, Hkv)), **COMPUTED),
    value(
        "v_scale: with compute_scales, expected shape [N, B, Hkv] = (5, 4, 2), got (2,); each",
        v_scale=np.ones(Hkv, np.float32),
        **COMPUTED,
    ),
    value("k_scale: must be writable", k_scale=lambda g: read_only(g["k_scale"]), **COMPUTED),
    value("k_scale: must not overlap v_scale", lambda g: COMPUTED | {"k_scale": g["v_scale"]}),
    value("all arrays must be on one device", lambda g: on_device(g, k=g["k"])),
    kind(
        "slot_mapping: a device array must be int32 or int64, got int16; convert it on the device",
        lambda g: on_device(g, slot_mapping=DeviceArray(np.zeros(T, np.int16))),
    ),
]


def pool_over(given, name):
    """Make a pool in the memory of the tokens."""
    pool = np.zeros((N, B, Hkv, D), BF16)
    given[name] = pool[0, :T]
    return pool


def scale_over_the_pool(given, name):
    memory = np.ones((N, B, Hkv, D + Dv), np.float32)
    return {name: memory[..., 0], "v_pool": memory.view(np.int8)[..., 3 : 3 + Dv]}


@pytest.fixture(autouse=True)
def pretend(monkeypatch):
    """Let fakes pass for device arrays, and a machine without CUDA for one with it."""
    monkeypatch.setattr(_device, "as_device_array", lambda array: array)
    monkeypatch.setattr(_device, "cuda_problem", lambda: None)


def contents(arguments):
    return {name: x.tobytes() for name, x in arguments.items() if isinstance(x, np.ndarray)}


def error_of(changes):
    """Call with wrong arguments; return the error, and check that no array has changed."""
    given, changes = valid(), dict(changes)
    arguments = given | changes.pop("several", lambda _: {})(given)
    for name, change in changes.items():
        arguments[name] = change(given) if callable(change) else change
    before = contents(arguments)
    with pytest.raises((ValueError, TypeError)) as caught:
        numba_attn.append_kv(**arguments)
    assert contents(arguments) == before
    return caught.value


@pytest.mark.parametrize(("changes", "error", "text"), CASES, ids=lambda x: str(x)[:40])
def test_message(changes, error, text):
    raised = error_of(changes)
    assert type(raised) is error
    assert text in str(raised)


@pytest.mark.parametrize("compute", [False, True])
def test_the_unchanged_arguments_are_valid(compute):
    arguments = valid() | {"compute_scales": compute}
    before = contents(arguments)
    numba_attn.append_kv(**arguments)
    changed = {name for name, x in contents(arguments).items() if x != before[name]}
    assert changed == {"k_pool", "v_pool", *(("k_scale", "v_scale") if compute else ())}


def test_scales_of_tokens_that_are_not_written_may_be_anything():
    arguments = valid()
    plain = valid()
    arguments["k_scale"][0, 1:] = np.nan
    arguments["slot_mapping"][1] = plain["slot_mapping"][1] = -1
    arguments["k_scale"][1] = 0
    numba_attn.append_kv(**arguments)
    numba_attn.append_kv(**plain)
    assert arguments["k_pool"].tobytes() == plain["k_pool"].tobytes()


def test_every_raise_has_a_case():
    path = pathlib.Path(_validate_append.__file__)
    statements = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Raise)]
    reached = set()
    for changes, _, _ in CASES:
        trace = error_of(changes).__traceback__
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == str(path):
                reached.add(trace.tb_lineno)
            trace = trace.tb_next
    missed = [
        statement.lineno
        for statement in statements
        if not reached & set(range(statement.lineno, statement.end_lineno + 1))
    ]
    assert not missed
    assert len(statements) >= 10


def test_every_message_names_the_argument_what_came_and_what_to_do():
    for changes, _, _ in CASES:
        message = str(error_of(changes))
        name, rest = message.split(": ", 1)
        assert name in {*valid(), "all arrays must be on one device"}
        assert "got" in rest or "on the host" in rest
        assert len(rest.split("; ", 1)[1]) > 5


@pytest.mark.cuda
def test_an_error_writes_nothing_on_a_device_either(monkeypatch):
    monkeypatch.undo()
    from _appending import on_device

    from numba_attn import _arrays

    given = valid()
    arrays = {name: on_device(x) for name, x in given.items() if isinstance(x, np.ndarray)}
    arrays["v"] = on_device(given["v"][:2])
    with pytest.raises(ValueError, match="v: its first axis must be T = 3"):
        numba_attn.append_kv(**arrays)
    for name in ("k_pool", "v_pool", "k_scale", "v_scale"):
        assert _arrays.to_host(arrays[name]).tobytes() == given[name].tobytes()
