"""Tensors of torch, wherever an array may be: the bits of the NumPy call, and nothing is copied."""

import copy
import pickle
import re
import subprocess
import sys
import tempfile

import numpy as np
import pytest
from _frameworks import (
    BF16,
    FORMATS,
    LENS,
    OPTIONS,
    TABLES,
    B,
    D,
    Hkv,
    Hq,
    N,
    S,
    bits,
    call,
    oracle,
    pools,
)
from _process import environment

import numba_attn
from numba_attn import AttentionState, _frameworks

torch = pytest.importorskip("torch", reason="torch is not installed")
_tensors = pytest.importorskip("_tensors", reason="torch is not installed")
assert_same, numbers = _tensors.assert_same, _tensors.numbers
tensor, tensors = _tensors.tensor, _tensors.tensors


@pytest.mark.parametrize("kv", FORMATS)
@pytest.mark.parametrize("q", ["bfloat16", "float16", "float32"])
def test_every_dtype(q, kv):
    given = call(q, kv)
    expected = numba_attn.paged_attention(**given, return_lse=True)
    assert_same(numba_attn.paged_attention(**tensors(given), return_lse=True), expected)
    out = numba_attn.paged_attention(**tensors(given))
    assert_same([out], expected[:1])


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option(name):
    given = call() | OPTIONS[name] | {"return_lse": True}
    expected = numba_attn.paged_attention(**given)
    assert_same(numba_attn.paged_attention(**tensors(given)), expected)
    positional = list(tensors(given).values())[:5]
    others = dict(list(tensors(given).items())[5:])
    assert_same(numba_attn.paged_attention(*positional, **others), expected)


def test_the_answer_is_right():
    given = call("float32", "float32")
    sinks = np.array([0.5, -1, 2, -np.inf], np.float32)
    out, lse = numba_attn.paged_attention(
        **tensors(given), sinks=tensor(sinks), sliding_window=7, return_lse=True
    )
    exact = oracle(**given, sinks=sinks, window=7)
    np.testing.assert_allclose(out.numpy(), exact[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lse.numpy(), exact[1], rtol=1e-5, atol=1e-6)


VIEWS = {
    "head-major": lambda pool: pool.transpose(1, 2).contiguous().transpose(1, 2),
    "one of two": lambda pool: torch.stack([pool, pool * 3], 1)[:, 0],
    "a slice of rows": lambda pool: torch.cat([pool * 2, pool], -1)[..., D:],
    "expanded": lambda pool: pool[:, :, :1].expand(-1, -1, Hkv, -1),
    "every other block": lambda pool: pool.repeat_interleave(2, 0)[::2],
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("kv", ["bfloat16", "float32", "float8_e4m3fn"])
def test_strides(view, kv):
    def of(array):
        plain = tensor(array).view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[array.itemsize])
        seen = view(plain)
        return seen.view(getattr(torch, array.dtype.name))

    given = call(kv=kv)
    k_pool, v_pool = of(given["k_pool"]), of(given["v_pool"])
    assert not k_pool.is_contiguous()
    plain = tensors(given) | {"k_pool": k_pool.contiguous(), "v_pool": v_pool.contiguous()}
    found = numba_attn.paged_attention(**tensors(given) | {"k_pool": k_pool, "v_pool": v_pool})
    assert numbers(found) == numbers(numba_attn.paged_attention(**plain))


def seen_by(monkeypatch, function):
    """Return the inputs that the package sees, as it checks them."""
    from numba_attn import _run

    seen, checked = [], _run.inputs
    monkeypatch.setattr(_run, "inputs", lambda *args: seen.append(args) or checked(*args))
    function()
    return seen[0]


def test_nothing_is_copied(monkeypatch):
    for kv in FORMATS:
        given = tensors(call("bfloat16", kv))
        given["k_pool"] = given["k_pool"].transpose(1, 2).contiguous().transpose(1, 2)
        with monkeypatch.context() as patch:
            seen = seen_by(patch, lambda given=given: numba_attn.paged_attention(**given))
        for array, name in zip(seen, ("q", "k_pool", "v_pool"), strict=False):
            assert array.__array_interface__["data"][0] == given[name].data_ptr()
            assert array.strides == tuple(n * array.itemsize for n in given[name].stride())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_out_is_written_and_returned(dtype):
    given = call(dtype)
    expected, expected_lse = numba_attn.paged_attention(**given, return_lse=True)
    wide = torch.full((S, Hq, 2 * D), 7, dtype=getattr(torch, dtype))
    out = wide[..., D:]
    found, lse = numba_attn.paged_attention(**tensors(given), out=out, return_lse=True)
    assert found is out
    assert_same([out.contiguous(), lse], [expected, expected_lse])
    assert (wide[..., :D] == 7).all()


def test_q_decides_the_kind_of_the_result():
    given = call()
    expected = numba_attn.paged_attention(**given)
    others = tensors(given) | {"q": given["q"]}
    found = numba_attn.paged_attention(**others)
    assert type(found) is np.ndarray
    assert found.dtype == BF16
    assert bits(found) == bits(expected)
    out = torch.empty(S, Hq, D, dtype=torch.bfloat16)
    assert numba_attn.paged_attention(**given, out=out) is out
    mixed = given | {"q": tensor(given["q"]), "seq_lens": LENS.tolist()}
    assert numbers(numba_attn.paged_attention(**mixed)) == bits(expected)
    array = np.empty((S, Hq, D), BF16)
    assert numba_attn.paged_attention(**mixed, out=array) is array


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64, torch.uint8])
def test_integers_of_any_dtype(dtype):
    given = call()
    tables = torch.from_numpy(np.where(TABLES > 100, 99, TABLES)).to(dtype)
    lens = torch.from_numpy(LENS).to(dtype)
    found = numba_attn.paged_attention(
        **tensors(given) | {"block_tables": tables, "seq_lens": lens}
    )
    assert numbers(found) == bits(numba_attn.paged_attention(**given))


def test_uint16_is_bfloat16_bits():
    given = call()
    carried = {n: x.view(np.uint16) if x.dtype == BF16 else x for n, x in given.items()}
    found = numba_attn.paged_attention(**tensors(carried))
    assert found.dtype is torch.uint16
    assert found.numpy().tobytes() == bits(numba_attn.paged_attention(**given))


def tiles(state, given, q):
    for first in range(3):
        tokens = np.clip(LENS - B * first, 0, B)
        numba_attn.step_tile(
            state,
            q,
            given["k_pool"],
            given["v_pool"],
            given["block_tables"][:, first : first + 1],
            tensor((tokens > 0).astype(np.int64)),
            tile_token_counts=tensor(tokens),
        )


def test_a_state_made_of_tensors_gives_tensors():
    given = call()
    arrays = AttentionState.like(given["q"], given["v_pool"])
    state = AttentionState.like(tensor(given["q"]), tensor(given["v_pool"]))
    assert (arrays.framework, state.framework) == (None, "torch")
    tiles(state, tensors(given), tensor(given["q"]))
    tiles(arrays, given, given["q"])
    assert type(state.o) is np.ndarray
    assert bits(state.buffer) == bits(arrays.buffer)
    sinks = np.arange(Hq, dtype=np.float32)
    expected = numba_attn.finalize(arrays, sinks=sinks, return_lse=True)
    assert_same(numba_attn.finalize(state, sinks=tensor(sinks), return_lse=True), expected)
    for base in ("e", "2"):
        assert_same(state.to_partial(base=base), arrays.to_partial(base=base))
    assert numbers(state.lse) == bits(arrays.lse)
    for twin in (copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
        assert numbers(numba_attn.finalize(twin)) == bits(numba_attn.finalize(arrays))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_finalize_takes_a_dtype_and_an_out_of_torch(dtype):
    given = call()
    state = AttentionState.like(given["q"], given["v_pool"])
    tiles(state, given, given["q"])
    expected = numba_attn.finalize(state, dtype=dtype)
    found = numba_attn.finalize(state, dtype=getattr(torch, dtype))
    assert type(found) is np.ndarray
    assert bits(found) == bits(expected)
    out = torch.empty(S, Hq, D, dtype=getattr(torch, dtype))
    assert numba_attn.finalize(state, dtype=out.dtype, out=out) is out
    assert numbers(out) == bits(expected)


def test_partials_and_merge():
    given = call("float32")
    out, lse = numba_attn.paged_attention(**given, return_lse=True)
    arrays, state = (
        AttentionState.from_partial(out, lse),
        AttentionState.from_partial(tensor(out), tensor(lse)),
    )
    other = AttentionState.from_partial(tensor(out.astype(BF16)), lse, base="2")
    assert other.framework == "torch"
    for one in (arrays, state):
        numba_attn.merge(one, other)
    assert bits(state.buffer) == bits(arrays.buffer)
    assert type(numba_attn.finalize(state)) is torch.Tensor
    assert type(numba_attn.finalize(arrays)) is np.ndarray
    state.reset()
    assert (state.lse == -torch.inf).all()


@pytest.mark.parametrize("kv", FORMATS)
def test_append(kv):
    computed = kv in ("float8_e4m3fn", "float8_e5m2", "int8")
    rng = np.random.default_rng(5)
    k, v = rng.standard_normal((2, 3, Hkv, D)).astype(BF16)
    slots = np.array([5, -1, 40])
    results = []
    for of in (lambda x: x, tensor):
        stored = [*pools(kv), *np.ones((2, N, B, Hkv), np.float32)]
        given = [of(x) for x in stored]
        scales = {"k_scale": given[2], "v_scale": given[3]} if computed else {}
        numba_attn.append_kv(of(k), of(v), *given[:2], of(slots), **scales, compute_scales=computed)
        results.append([bits(x) for x in stored])
    assert results[0] == results[1]
    assert results[0][0] != bits(pools(kv)[0])


def test_streams():
    given = call()
    expected = numba_attn.paged_attention(**given, return_lse=True)
    torches = tensors(given)
    source = numba_attn.ArraySource(torches["k_pool"], torches["v_pool"])
    where = source, torches["block_tables"], torches["seq_lens"]
    found = numba_attn.stream_attention(torches["q"], *where, resident_blocks=4, return_lse=True)
    assert [x.dtype for x in found] == [torch.bfloat16, torch.float32]
    np.testing.assert_allclose(found[1].numpy(), expected[1], rtol=1e-6)
    with numba_attn.Streamer(4) as streamer:
        first = streamer.attend(torches["q"], *where, then=where)
        second = streamer.attend(torches["q"], *where)
    assert numbers(first) == numbers(second) == numbers(found[0])


def test_a_file_is_written_from_tensors():
    k, v = pools()
    sizes = {"num_blocks": N, "block_size": B, "num_kv_heads": Hkv, "head_dim": D}
    answers = []
    for of in (lambda x: x, tensor):
        with numba_attn.KVFile.create(tempfile.mkdtemp() + "/kv", num_layers=1, **sizes) as file:
            file.write_blocks(0, of(np.arange(N)), of(k), of(v))
            file.append_kv(0, of(v[0]), of(k[0]), of(np.arange(8, 12)))
            where = file.layer(0), TABLES, LENS
            q = call()["q"]
            answers.append(bits(numba_attn.stream_attention(q, *where, resident_blocks=6)))
    assert answers[0] == answers[1]


def test_gradients_are_refused_and_parameters_are_not():
    given = tensors(call("float32", "float32"))
    expected = numbers(numba_attn.paged_attention(**given))
    for name in ("q", "k_pool", "v_pool"):
        spoiled = given | {name: given[name].clone().requires_grad_()}
        text = f"{name}: expected a tensor that autograd does not follow, got one with"
        with pytest.raises(TypeError, match=re.escape(text)):
            numba_attn.paged_attention(**spoiled)
        for context in (torch.no_grad(), torch.inference_mode()):
            with context:
                assert numbers(numba_attn.paged_attention(**spoiled)) == expected
    parameter = torch.nn.Parameter(given["q"].bfloat16())
    with torch.no_grad():
        assert (
            numba_attn.paged_attention(parameter, *list(given.values())[1:]).dtype
            is parameter.dtype
        )


def sparse(x):
    return x.to_sparse()


def quantized(x):
    return torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)


def fake(x):
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode() as mode:
        return mode.from_tensor(x)


def wrapper(x):
    """Return a tensor that has sizes, and no memory of its own, as a DTensor."""

    class Wrapper(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, *args, **options):
            raise NotImplementedError

    return torch.Tensor._make_wrapper_subclass(Wrapper, x.size(), dtype=x.dtype)


ODD = {
    "meta": (lambda x: x.to("meta"), "one on the meta device, which has no values; material"),
    "sparse": (sparse, "one of layout torch.sparse_coo; make it dense with .to_dense()"),
    "sparse bfloat16": (lambda x: sparse(x.bfloat16()), "one of layout torch.sparse_coo"),
    "mkldnn": (lambda x: x.to_mkldnn(), "one of layout torch._mkldnn; make it dense"),
    "quantized": (quantized, "a quantized one; pass .int_repr(), and its scale as k_scale or v_"),
    "nested": (lambda x: torch.nested.nested_tensor([x[0], x[1]]), "a nested one; pad it"),
    "negated": (torch._neg_view, "a lazily conjugated or negated one; pass .resolve_conj()"),
    "conjugated": (lambda x: x.to(torch.complex64).conj(), "a lazily conjugated or negated one"),
    "complex32": (lambda x: x.to(torch.complex32), "dtype torch.complex32; convert it with .to("),
    "float8_e8m0fnu": (lambda x: x.abs().to(torch.float8_e8m0fnu), "dtype torch.float8_e8m0fnu"),
    "wrapper": (wrapper, "Wrapper, of which torch says: "),
    "fake": (fake, "FakeTensor, of which torch says: .numpy() is not supported for tensor subcl"),
}


@pytest.mark.filterwarnings("ignore")  # torch's, of what is deprecated or a prototype
@pytest.mark.parametrize("argument", ["q", "k_pool"])
@pytest.mark.parametrize(("make", "text"), ODD.values(), ids=ODD)
def test_tensors_that_are_no_plain_memory(make, text, argument):
    given = tensors(call("float32", "float32"))
    given[argument] = make(given[argument])
    expected = f"{argument}: expected a strided tensor of real numbers, got {text}"
    out = torch.full((S, Hq, D), 7.0)
    with pytest.raises(TypeError, match=re.escape(expected)):
        numba_attn.paged_attention(**given, out=out)
    assert (out == 7).all()


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"q": torch.ones(S, Hq, D, dtype=torch.float64)}, TypeError, "q: expected dtype bfloat16"),
        ({"q": torch.ones(S, Hq, D, dtype=torch.int64)}, TypeError, "got int64; convert it with"),
        ({"k_pool": torch.ones(N, B, Hkv, D).bool()}, TypeError, "k_pool: expected dtype bfloat16"),
        ({"q": torch.ones(S, D)}, ValueError, "q: expected 3 or 4 axes"),
        ({"q": torch.ones(S, Hq, 2 * D)[..., ::2]}, ValueError, "q: the last axis of [S, Hq, D]"),
        ({"seq_lens": torch.tensor([11, 0, 13])}, ValueError, "seq_lens: must be from 0 to"),
        (
            {"seq_lens": torch.ones(S)},
            TypeError,
            "seq_lens: expected integers (int32), got float32",
        ),
        ({"seq_lens": torch.tensor(3)}, ValueError, "seq_lens: expected shape [S] = (3,)"),
        ({"out": torch.ones(S, Hq, D)}, TypeError, "out: expected dtype bfloat16, that of the"),
        ({"out": torch.ones(S, Hq, 3).bfloat16()}, ValueError, "out: expected shape (3, 4, 16)"),
        ({"sinks": torch.ones(3)}, ValueError, "sinks: expected shape [Hq] = (4,)"),
        ({"scale": torch.tensor(-1.0)}, ValueError, "scale: must be positive and finite"),
        ({"stream": 7}, ValueError, "stream: only what runs on a CUDA device has one"),
    ],
)
def test_the_messages_are_those_of_arrays(changes, error, text):
    with pytest.raises(error, match=re.escape(text)):
        numba_attn.paged_attention(**tensors(call()) | changes)


def test_out_may_not_overlap_what_is_read():
    given = tensors(call())
    with pytest.raises(ValueError, match="out: must not overlap q, got a view of its memory"):
        numba_attn.paged_attention(**given, out=given["q"])
    k_pool = given["k_pool"][:1].expand(N, -1, -1, -1)
    with pytest.raises(ValueError, match="k_pool: its elements must lie apart, got strides"):
        numba_attn.append_kv(given["k_pool"][0], None, k_pool, None, [0, 1, 2, 3])


@pytest.mark.parametrize("kind", ["xpu", "mps"])
def test_other_devices_are_refused(kind):
    class Elsewhere(torch.Tensor):
        device = torch.device(kind)

        def numpy(self):
            raise TypeError(f"can't convert {kind}:0 device type tensor to numpy")

    given = tensors(call("float32"))
    given["q"] = given["q"].as_subclass(Elsewhere)
    text = f"q: expected a tensor on the CPU or a CUDA device, got one on '{kind}'; move it with"
    with pytest.raises(RuntimeError, match=re.escape(text)):
        numba_attn.paged_attention(**given)


def test_numbers_may_be_tensors():
    given, scales = call(), {"scale": 0.25, "k_scale": 0.5, "v_scale": 2.0}
    expected = numba_attn.paged_attention(**given, **scales)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        ones = {name: torch.tensor(x, dtype=dtype) for name, x in scales.items()}
        assert numbers(numba_attn.paged_attention(**tensors(given), **ones)) == bits(expected)


def test_classes_of_a_framework_are_known_by_their_bases():
    class Mine(torch.Tensor):
        pass

    assert _frameworks.framework_of(torch.ones(2).as_subclass(Mine)) == "torch"
    assert _frameworks.framework_of(torch.nn.Parameter(torch.ones(2))) == "torch"
    for other in (torch.float32, torch, np.ones(3), None, 3, "torch", object()):
        assert _frameworks.framework_of(other) is None


SCRIPT = """
import sys
import numpy as np
import numba_attn
one = np.ones((1, 1, 1, 4), np.float16)
numba_attn.paged_attention(one[0], one, one, [[0]], [1])
state = numba_attn.AttentionState.like(one[0], one)
numba_attn.step_tile(state, one[0], one, one, [[0]], [1])
numba_attn.append_kv(one[0].copy(), None, one, None, [0])
numba_attn.finalize(state, dtype="float32")
print(sorted({"torch", "jax", "jaxlib", "cupy", "ml_dtypes"} & set(sys.modules)))
"""


def test_no_framework_is_imported_for_arrays_of_numpy():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=environment(),
        capture_output=True,
        check=True,
        text=True,
    )
    assert done.stdout == "[]\n"
