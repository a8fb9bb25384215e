"""Interchange with other kernels: (out, lse) of some of the keys, in base e or 2."""

import math

import _backends
import ml_dtypes
import numpy as np
import pytest
from _appending import on_device
from _arguments import FakeDeviceArray
from _bound import EPS, assert_same_bits, check_answer, check_close, check_state, normalise
from _cases import Answer, absorb, draw, place
from _oracle import dense

from numba_attn import AttentionState, _arrays, _device

BASES = {"e": 1.0, "2": math.log(2)}


def from_partial(backend, out, lse, base):
    """Make a state on the backend's device."""
    if backend.name == "cuda":
        out, lse = on_device(out), on_device(lse)
    return backend.module.AttentionState.from_partial(out, lse, base=base)


def to_partial(backend, state, base):
    out, lse = state.to_partial(base=base)
    return np.array(_arrays.to_host(out)), np.array(_arrays.to_host(lse))


def partial_of(seqs, base, dtype=np.float32):
    """Return what another kernel would of some tokens: out in a dtype, float32 lse in a base."""
    out, lse = dense(seqs)
    return out.astype(dtype), (lse / BASES[base]).astype(np.float32)


def halves(backend):
    seqs = draw(backend.size((90, 50, 3, 1, 0), (9, 1, 0)), gqa=3, v_head_dim=20)
    cut = backend.size(41, 4)
    return seqs, (seqs.tokens(0, cut), seqs.tokens(cut, max(seqs.lens)))


@pytest.mark.parametrize("base", BASES)
def test_merged_halves_equal_the_whole(backend, base):
    """Rows that lie in one half only among them."""
    seqs, parts = halves(backend)
    states = [from_partial(backend, *partial_of(part, base), base) for part in parts]
    backend.merge(*states)
    check_state(seqs, backend.read(states[0]))


@pytest.mark.parametrize("base", BASES)
def test_a_partial_merges_with_a_state_of_ours(backend, base):
    seqs, (first, second) = halves(backend)
    state = absorb(backend, second, place(second, 4))
    backend.merge(state, from_partial(backend, *partial_of(first, base), base))
    check_state(seqs, backend.read(state))


@pytest.mark.parametrize("base", BASES)
def test_our_partial_is_the_answer_of_its_keys(backend, base):
    seqs, _ = halves(backend)
    state = absorb(backend, seqs, place(seqs, 4))
    before = backend.read(state)
    out, lse = to_partial(backend, state, base)
    assert backend.name == "reference" or out.dtype == lse.dtype == np.float32
    check_answer(seqs, Answer(out.astype(np.float32), lse * BASES[base]))
    assert_same_bits(*zip(before, backend.read(state), strict=True))


def test_halves_in_different_bases(backend):
    seqs, (first, second) = halves(backend)
    state = from_partial(backend, *partial_of(first, "e"), "e")
    backend.merge(state, from_partial(backend, *partial_of(second, "2"), "2"))
    check_state(seqs, backend.read(state))


def test_a_base_taken_for_the_other_is_far_off(backend):
    seqs, parts = halves(backend)
    states = [from_partial(backend, *partial_of(part, "2"), "e") for part in parts]
    backend.merge(*states)
    with pytest.raises(AssertionError, match="off by"):
        check_state(seqs, backend.read(states[0]))


@pytest.mark.parametrize("base", BASES)
def test_there_and_back(backend, base):
    """Normalised, so only the rounding of o / l and of the lse is lost."""
    seqs, _ = halves(backend)
    state = absorb(backend, seqs, place(seqs, 4))
    back = from_partial(backend, *to_partial(backend, state, base), base)
    check_close(seqs, normalise(backend.read(back)), normalise(backend.read(state)))
    check_state(seqs, backend.read(back))
    again = from_partial(backend, *to_partial(backend, back, base), base)
    check_close(seqs, normalise(backend.read(again)), normalise(backend.read(back)))


def test_base_e_keeps_every_bit(backend):
    rng = np.random.default_rng(2)
    out = rng.standard_normal((2, 3, 5)).astype(np.float32)
    lse = (30 * rng.standard_normal((2, 3))).astype(np.float32)
    m, l, o = backend.read(from_partial(backend, out, lse, "e"))
    assert (m == lse).all()
    assert (l == 1).all()
    assert (o == out).all()
    found, sums = to_partial(backend, from_partial(backend, out, lse, "e"), "e")
    assert (found == out).all()
    assert (sums == lse).all()


def test_a_large_lse_in_base_2_loses_nothing(twin):
    """Weights are exp(lse), so that an error in m would show: l makes up for its rounding."""
    lse = np.array([[3000.37], [1000.123]], np.float32)
    m, l, _ = twin.read(from_partial(twin, np.ones((2, 1, 1), np.float32), lse, "2"))
    exact = lse.astype(np.float64) * math.log(2)
    error = m.astype(np.float64) + np.log(l.astype(np.float64)) - exact
    assert abs(error).max() < 2 * EPS
    assert abs(m - exact).max() > 100 * EPS


EMPTY = pytest.mark.parametrize("empty", [-np.inf, np.inf])


@EMPTY
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("inside", [np.nan, np.inf, 7.0])
def test_an_infinite_lse_is_an_empty_row(backend, empty, base, inside):
    """Whatever out holds there."""
    out, lse = np.full((2, 2, 3), inside, np.float32), np.full((2, 2), empty, np.float32)
    out[1], lse[1, 1] = 2, 0.5
    state = from_partial(backend, out, lse, base)
    m, l, o = backend.read(state)
    assert (m[lse == empty] == -np.inf).all()
    assert (l[lse == empty] == 0).all()
    assert (o[lse == empty] == 0).all()
    back_out, back_lse = to_partial(backend, state, base)
    assert (back_out[0] == 0).all()
    assert (back_lse[lse == empty] == -np.inf).all()
    np.testing.assert_allclose(back_lse[1, 1], 0.5, rtol=1e-6)
    np.testing.assert_allclose(back_out[1, 1], 2, rtol=1e-6)


@EMPTY
def test_two_empty_partials_merge_to_an_empty_one(backend, empty):
    out, lse = np.full((2, 2, 3), np.nan, np.float32), np.full((2, 2), empty, np.float32)
    states = [from_partial(backend, out, lse, "2") for _ in range(2)]
    backend.merge(*states)
    found, sums = to_partial(backend, states[0], "2")
    assert (found == 0).all()
    assert (sums == -np.inf).all()


@EMPTY
def test_an_empty_partial_changes_no_bit(backend, empty):
    seqs, (first, _) = halves(backend)
    state = absorb(backend, first, place(first, 4))
    before = backend.read(state)
    rows = before[2].shape
    nothing = np.full(rows, np.nan, np.float32), np.full(rows[:2], empty, np.float32)
    backend.merge(state, from_partial(backend, *nothing, "e"))
    assert_same_bits(*zip(before, backend.read(state), strict=True))


def test_nan_stays_nan(backend):
    out, lse = np.ones((1, 2, 2), np.float32), np.array([[np.nan, 0]], np.float32)
    state = from_partial(backend, out, lse, "e")
    backend.merge(state, from_partial(backend, out, np.zeros((1, 2), np.float32), "e"))
    found, sums = to_partial(backend, state, "e")
    assert np.isnan(found[0, 0]).all()
    assert np.isnan(sums[0, 0])
    assert np.isfinite(found[0, 1]).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_any_float_dtype_of_out(backend, dtype):
    seqs, parts = halves(backend)
    dtype = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    states = []
    for part in parts:
        out, lse = partial_of(part, "2", dtype)
        exact = from_partial(backend, out.astype(np.float32), lse, "2")
        states.append(from_partial(backend, out, lse, "2"))
        assert dtype == np.float64 or all(
            (a == b).all()
            for a, b in zip(backend.read(exact), backend.read(states[-1]), strict=True)
        )
    backend.merge(*states)
    if dtype.itemsize > 2:
        check_state(seqs, backend.read(states[0]))


def test_uint16_is_taken_as_bfloat16(backend):
    out = np.array([[[0.5, -3.0]]], ml_dtypes.bfloat16)
    lse = np.zeros((1, 1), np.float32)
    state = from_partial(backend, out.view(np.uint16), lse, "e")
    np.testing.assert_array_equal(backend.read(state)[2], out.astype(np.float32))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_any_float_dtype_of_lse(backend, dtype):
    lse = np.array([[0.5, -3.0]], np.dtype(getattr(ml_dtypes, dtype, None) or dtype))
    state = from_partial(backend, np.ones((1, 2, 1), np.float32), lse, "e")
    np.testing.assert_array_equal(backend.read(state)[0], lse.astype(np.float32))


def test_several_queries(backend):
    """[S, Q, Hq, Dv] with [S, Q, Hq]: a row for each query token."""
    seqs = draw((6, 4), queries=2, v_head_dim=5)
    out, lse = partial_of(seqs, "e")
    four = out.reshape(2, 2, *out.shape[1:]), lse.reshape(2, 2, lse.shape[1])
    states = [from_partial(backend, *given, "e") for given in (four, (out, lse))]
    assert_same_bits(*zip(*map(backend.read, states), strict=True))
    assert states[0].o.shape == out.shape
    check_state(seqs, backend.read(states[0]))


def test_arrays_of_any_strides(cpu):
    """FlashAttention's lse is [S, Hq, Q]."""
    rng = np.random.default_rng(4)
    out = rng.standard_normal((2, 5, 3, 8)).astype(np.float32).transpose(0, 2, 1, 3)[..., ::2]
    lse = rng.standard_normal((2, 5, 3)).astype(np.float32).transpose(0, 2, 1)
    state = from_partial(cpu, out, lse, "2")
    copies = from_partial(cpu, out.copy(), lse.copy(), "2")
    assert_same_bits(*zip(cpu.read(state), cpu.read(copies), strict=True))


def test_no_rows(backend):
    state = from_partial(
        backend, np.zeros((0, 2, 3), np.float32), np.zeros((0, 2), np.float32), "2"
    )
    out, lse = to_partial(backend, state, "2")
    assert (out.shape, lse.shape) == ((0, 2, 3), (0, 2))


def test_a_sink_is_never_in_a_partial(backend):
    """It is counted by `finalize`, once."""
    seqs, parts = halves(backend)
    seqs = seqs.but(sinks=np.full(seqs.q.shape[1], 1.5, np.float32))
    states = [absorb(backend, part, place(part, 4)) for part in parts]
    heads = seqs.sinks
    sinks = on_device(heads) if backend.name == "cuda" else heads
    backend.finalize(states[0], sinks=sinks)
    partials = [to_partial(backend, state, "2") for state in states]
    merged = [from_partial(backend, *given, "2") for given in partials]
    backend.merge(*merged)
    check_state(seqs, backend.read(merged[0]))
    answer = backend.finalize(merged[0], sinks=sinks, return_lse=True)
    check_answer(seqs, Answer(*answer))


OUT, LSE = np.zeros((2, 3, 4), np.float32), np.zeros((2, 3), np.float32)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"base": "10"}, ValueError, "base: expected 'e' (FlashAttention) or '2' (FlashInfer), go"),
        ({"base": 2}, ValueError, "base: expected 'e' (FlashAttention) or '2' (FlashInfer), got 2"),
        ({"base": LSE}, ValueError, "got array("),
        (
            {"out": [[[1.0]]]},
            TypeError,
            "out: expected a NumPy array or a CUDA array, got list; co",
        ),
        (
            {"lse": np.ma.ones((2, 3))},
            TypeError,
            "lse: expected a NumPy array or a CUDA array, got",
        ),
        (
            {"out": OUT.astype(int)},
            TypeError,
            "out: expected floats (bfloat16, float16, float32 or",
        ),
        ({"lse": LSE.astype("i2")}, TypeError, "lse: expected floats (bfloat16, float16, float32"),
        (
            {"out": OUT[0]},
            ValueError,
            "out: expected 3 or 4 axes [queries, Hq, Dv] or [S, Q, Hq, D",
        ),
        (
            {"lse": LSE.T},
            ValueError,
            "lse: expected shape (2, 3), that of out without Dv, got (3, 2); transpose FlashAttent",
        ),
        ({"lse": LSE[..., None]}, ValueError, "lse: expected shape (2, 3), that of out without"),
        ({"out": OUT[..., :0]}, ValueError, "head_dim: must be at least 1, got 0"),
        ({"lse": FakeDeviceArray(LSE)}, ValueError, "all arrays must be on one device: lse are on"),
    ],
    ids=lambda x: str(x)[:30],
)
def test_wrong_arguments_of_from_partial(changes, error, text):
    with pytest.raises(error) as caught:
        AttentionState.from_partial(**({"out": OUT, "lse": LSE} | changes))
    assert text in str(caught.value)


def test_wrong_base_of_to_partial():
    state = AttentionState(1, 1, 1)
    with pytest.raises(ValueError, match="base: expected 'e' .* or '2'"):
        state.to_partial(base="10")


@pytest.mark.cuda
def test_a_partial_on_a_device_stays_there():
    out, lse = on_device(OUT), on_device(LSE)
    state = AttentionState.from_partial(out, lse, base="2")
    assert state.device == "cuda"
    assert all(_device.is_device_array(x) for base in BASES for x in state.to_partial(base=base))


@pytest.mark.parametrize("base", ["e", "2"])
@pytest.mark.parametrize("lse", [-1e30, -0.9667e10, 1.0333e10, 1e30])
def test_a_large_lse_is_a_state_like_any_other(base, lse):
    """Some kernels write -1e30 for -inf: merged, it is nothing, and it never becomes NaN."""
    out = np.ones((1, 1, 2), np.float32)
    given = AttentionState.from_partial(out, np.array([[lse]]), base=base)
    back, sums = given.to_partial(base=base)
    np.testing.assert_array_equal(back, out)
    np.testing.assert_allclose(sums, lse, rtol=1e-6)
    state = AttentionState.from_partial(2 * out, np.array([[1.0]]), base=base)
    _backends.get("cpu").merge(state, given)
    assert (state.to_partial(base=base)[0] == (2 if lse < 0 else 1)).all()
