"""JAX arrays on the CPU: the bits of the NumPy call, nothing copied in, nothing written to."""

import os
import re

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before JAX looks for others

import numpy as np
import pytest
from _frameworks import BF16, FORMATS, LENS, OPTIONS, D, Hkv, Hq, S, bits, call, pools

import numba_attn
from numba_attn import AttentionState, _run

jax = pytest.importorskip("jax", reason="JAX is not installed")
jnp = pytest.importorskip("jax.numpy", reason="JAX is not installed")


def jaxes(arguments):
    return {n: jnp.asarray(x) if isinstance(x, np.ndarray) else x for n, x in arguments.items()}


def assert_same(results, expected):
    for found, array in zip(results, expected, strict=True):
        assert isinstance(found, jax.Array)
        assert found.dtype == array.dtype
        assert found.shape == array.shape
        assert bits(found) == bits(array)


@pytest.mark.parametrize("kv", FORMATS)
@pytest.mark.parametrize("q", ["bfloat16", "float16", "float32"])
def test_every_dtype(q, kv):
    given = call(q, kv) | {"return_lse": True}
    expected = numba_attn.paged_attention(**given)
    assert_same(numba_attn.paged_attention(**jaxes(given)), expected)


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option(name):
    given = call() | OPTIONS[name] | {"return_lse": True}
    assert_same(numba_attn.paged_attention(**jaxes(given)), numba_attn.paged_attention(**given))


def test_nothing_is_copied(monkeypatch):
    seen, checked = [], _run.inputs
    monkeypatch.setattr(_run, "inputs", lambda *args: seen.append(args) or checked(*args))
    for kv in FORMATS:
        given = jaxes(call(kv=kv))
        numba_attn.paged_attention(**given)
        for array, name in zip(seen.pop(), ("q", "k_pool", "v_pool"), strict=False):
            address = array.__array_interface__["data"][0]
            assert address == given[name].unsafe_buffer_pointer()
            assert not array.flags.writeable


def test_results_are_where_q_is():
    given = jaxes(call())
    found = numba_attn.paged_attention(**given)
    assert found.devices() == given["q"].devices()


def test_q_decides_the_kind_of_the_result():
    given = call()
    expected = bits(numba_attn.paged_attention(**given))
    mixed = jaxes(given) | {"q": given["q"], "seq_lens": LENS.tolist()}
    found = numba_attn.paged_attention(**mixed)
    assert (type(found), found.dtype) == (np.ndarray, BF16)
    assert bits(found) == expected
    out = np.empty((S, Hq, D), BF16)
    assert numba_attn.paged_attention(**jaxes(given), out=out) is out
    assert bits(out) == expected


def test_a_state_made_of_jax_arrays_gives_jax_arrays():
    given = call()
    answers = []
    for arguments in (given, jaxes(given)):
        q, k_pool, v_pool = (arguments[name] for name in ("q", "k_pool", "v_pool"))
        state = AttentionState.like(q, v_pool)
        counts = -(-arguments["seq_lens"] // 4)
        numba_attn.step_tile(
            state,
            q,
            k_pool,
            v_pool,
            arguments["block_tables"],
            counts,
            tile_token_counts=arguments["seq_lens"],
        )
        again = AttentionState.from_partial(*state.to_partial(base="2"), base="2")
        half = numba_attn.finalize(again, dtype=jnp.float16)
        answers.append([*numba_attn.finalize(state, return_lse=True), state.lse, half])
    assert_same(answers[1], answers[0])


def test_append_from_jax_into_a_pool_of_numpy():
    k, v = np.random.default_rng(5).standard_normal((2, 3, Hkv, D)).astype(BF16)
    stored = pools(), pools()
    numba_attn.append_kv(k, v, *stored[0], [5, -1, 40])
    numba_attn.append_kv(*map(jnp.asarray, (k, v)), *stored[1], jnp.array([5, -1, 40]))
    assert [bits(x) for x in stored[0]] == [bits(x) for x in stored[1]]


def test_streams():
    given = jaxes(call())
    source = numba_attn.ArraySource(given["k_pool"], given["v_pool"])
    where = source, given["block_tables"], given["seq_lens"]
    found = numba_attn.stream_attention(given["q"], *where, resident_blocks=4, return_lse=True)
    expected = numba_attn.paged_attention(**call(), return_lse=True)
    assert all(isinstance(x, jax.Array) for x in found)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-6)


WRITTEN = "is written to, and a JAX array is read-only; pass a NumPy array, and make a JAX array"


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"out": jnp.zeros((S, Hq, D), jnp.bfloat16)}, TypeError, f"out: {WRITTEN}"),
        ({"q": jnp.ones((S, Hq, D), jnp.int32)}, TypeError, "q: expected dtype bfloat16, float16"),
        ({"q": jnp.ones((S, D))}, ValueError, "q: expected 3 or 4 axes"),
        ({"seq_lens": jnp.array([11, 0, 13])}, ValueError, "seq_lens: must be from 0 to"),
        ({"k_scale": jnp.ones(3)}, ValueError, "k_scale: expected a number, [Hkv] = (2,)"),
        ({"scale": jnp.array(-1.0)}, ValueError, "scale: must be positive and finite"),
    ],
)
def test_the_messages_are_those_of_arrays(changes, error, text):
    with pytest.raises(error, match=re.escape(text)):
        numba_attn.paged_attention(**jaxes(call()) | changes)


def test_a_pool_of_jax_is_not_written():
    k = np.ones((1, Hkv, D), BF16)
    given = pools()
    before = bits(given[1])
    for i, name in enumerate(("k_pool", "v_pool")):
        args = [jnp.asarray(x) if i == j else x for j, x in enumerate(given)]
        with pytest.raises(TypeError, match=re.escape(f"{name}: {WRITTEN}")):
            numba_attn.append_kv(k, k, *args, [3])
    assert bits(given[1]) == before


def test_a_scale_of_jax_is_not_computed_into():
    k, pool = np.ones((1, Hkv, D), BF16), pools("int8")[0]
    scale = jnp.ones(pool.shape[:3], jnp.float32)
    with pytest.raises(ValueError, match="k_scale: must be writable, got a read-only array"):
        numba_attn.append_kv(k, None, pool, None, [3], k_scale=scale, compute_scales=True)


def test_inside_jit_it_says_what_to_do():
    given = jaxes(call())
    text = "q: expected an array with values, got a JAX tracer (of jit, grad or vmap); call it out"
    others = {name: x for name, x in given.items() if name != "q"}
    with pytest.raises(TypeError, match=re.escape(text)):
        jax.jit(lambda q: numba_attn.paged_attention(q, **others))(given["q"])
    with pytest.raises(TypeError, match="k_pool: expected an array with values"):
        jax.jit(lambda k_pool: numba_attn.paged_attention(**given | {"k_pool": k_pool}))(
            given["k_pool"]
        )


def test_inside_jit_through_a_callback():
    given = jaxes(call())
    shape = jax.ShapeDtypeStruct((S, Hq, D), jnp.bfloat16)
    step = jax.jit(lambda *args: jax.pure_callback(numba_attn.paged_attention, shape, *args))
    assert bits(step(*given.values())) == bits(numba_attn.paged_attention(**call()))


def test_arrays_on_other_devices_are_refused():
    class Tpu:
        platform = "tpu"

        def __str__(self):
            return "TPU_0"

    from numba_attn import _jax_arrays

    class Array:
        ndim = 3

        def devices(self):
            return {Tpu()}

    with pytest.raises(RuntimeError, match="q: expected an array on one CPU or CUDA device, got"):
        _jax_arrays.taken("q", Array(), False)


def test_numbers_may_be_jax_arrays():
    given, scales = call(), {"scale": 0.25, "k_scale": 0.5, "v_scale": 2.0}
    expected = numba_attn.paged_attention(**given, **scales)
    for dtype in (jnp.float32, jnp.bfloat16):
        ones = {name: jnp.array(x, dtype) for name, x in scales.items()}
        assert bits(numba_attn.paged_attention(**jaxes(given), **ones)) == bits(expected)
