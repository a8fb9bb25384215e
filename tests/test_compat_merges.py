"""Merges of partial results, in the words of FlashInfer and vLLM, and across front ends."""

import numpy as np
import pytest
from _dense import CLOSE, LN2, attend, draw, one

from numba_attn.compat import (
    flash_attn_with_kvcache,
    merge_attn_states,
    merge_state,
    merge_states,
    single_decode_with_kv_cache,
)


def parts(bounds, base):
    """Partial results of FlashInfer's front end (base 2) or FlashAttention's, by ranges of keys."""
    q, k, v = one()
    found = []
    for begin, end in bounds:
        some_k, some_v = k[begin:end], v[begin:end]
        if base == 2:
            out, lse = single_decode_with_kv_cache(q, some_k, some_v, return_lse=True)
        else:
            out, lse = flash_attn_with_kvcache(
                q[None, None], some_k[None], some_v[None], return_softmax_lse=True
            )
            out, lse = out[0, 0], lse[0, :, 0]
        found.append((out[None], lse[None]))
    return found, attend(q, k, v)


def test_merge_state():
    ((v_a, s_a), (v_b, s_b)), (out, lse) = parts([(0, 20), (20, 50)], 2)
    v, s = merge_state(v_a, s_a, v_b, s_b)
    np.testing.assert_allclose(v[0], out, **CLOSE)
    np.testing.assert_allclose(s[0], lse / LN2, **CLOSE)
    assert (v.dtype, s.dtype) == (np.float32, np.float32)


def test_merge_states():
    found, (out, lse) = parts([(0, 20), (20, 21), (21, 50)], 2)
    found.insert(1, (np.full((1, 4, 32), np.nan, np.float32), np.full((1, 4), -np.inf)))
    v, s = merge_states(*(np.stack(x, axis=1) for x in zip(*found, strict=True)))
    np.testing.assert_allclose(v[0], out, **CLOSE)
    np.testing.assert_allclose(s[0], lse / LN2, **CLOSE)


def test_merge_attn_states():
    ((a, lse_a), (b, lse_b)), (out, lse) = parts([(0, 20), (20, 50)], "e")
    output, output_lse = np.empty_like(a), np.empty_like(lse_a.T)
    assert merge_attn_states(output, a, lse_a.T, b, lse_b.T, output_lse) is None
    np.testing.assert_allclose(output[0], out, **CLOSE)
    np.testing.assert_allclose(output_lse[:, 0], lse, **CLOSE)
    again = np.empty_like(a)
    merge_attn_states(again, a, lse_a.T, b, lse_b.T)
    np.testing.assert_array_equal(again, output)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_merge_attn_states_of_the_first_tokens_only(count):
    a, b, lse_a, lse_b = draw(3, 4, 32), draw(3, 4, 32, seed=1), draw(4, 3), draw(4, 3, seed=2)
    output, output_lse = np.empty_like(a), np.empty_like(lse_a)
    merge_attn_states(output, a, lse_a, b, lse_b, output_lse, count)
    whole, whole_lse = np.empty_like(a), np.empty_like(lse_a)
    merge_attn_states(whole, a, lse_a, b, lse_b, whole_lse)
    np.testing.assert_array_equal(output, np.concatenate([whole[:count], b[count:]]))
    np.testing.assert_array_equal(output_lse[:, :count], whole_lse[:, :count])
    np.testing.assert_array_equal(output_lse[:, count:], lse_b[:, count:])


def test_merge_attn_states_in_place():
    a, b, lse_a, lse_b = draw(3, 4, 32), draw(3, 4, 32, seed=1), draw(4, 3), draw(4, 3, seed=2)
    expected = np.empty_like(a)
    merge_attn_states(expected, a, lse_a, b, lse_b)
    merge_attn_states(b, a, lse_a, b, lse_b, lse_b, 2)
    np.testing.assert_array_equal(b[:2], expected[:2])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"output": np.zeros((3, 4))}, ValueError, "output: expected 3 axes"),
        ({"output": np.zeros((3, 4, 32), np.int32)}, TypeError, "dtype"),
        ({"output": draw(3, 4, 64)[:, :, ::2]}, ValueError, "output: the last axis"),
        ({"output_lse": draw(3, 4)}, ValueError, "output_lse: expected shape"),
        ({"output_lse": np.zeros((4, 3))}, TypeError, "output_lse: expected float32, got float64"),
        ({"output_lse": 7}, TypeError, "output_lse: expected an array"),
        ({"output_lse": np.broadcast_to(draw(4, 1), (4, 3))}, ValueError, "output_lse: must be w"),
        ({"prefix_lse": draw(3, 4)}, ValueError, "prefix_lse: expected shape .* = .4, 3."),
        ({"suffix_lse": draw(4)}, ValueError, "suffix_lse: expected 2 axes"),
        ({"suffix_output": draw(2, 4, 32)}, ValueError, "suffix_output: expected the shape of ou"),
        ({"suffix_output": np.zeros((3, 4, 32), int)}, TypeError, "suffix_output: expected floats"),
        (
            {"prefill_tokens_with_context": 4},
            ValueError,
            "prefill_tokens_with_context: must be from 0",
        ),
        ({"prefill_tokens_with_context": 1.0}, TypeError, "prefill_tokens_with_context: expected"),
        ({"output_scale": 1.0}, ValueError, "output_scale: no output is quantised"),
    ],
    ids=lambda x: str(x)[:40],
)
def test_what_merge_attn_states_does_not_take(change, error, message):
    """Nothing is written then."""
    a, lse = draw(3, 4, 32), draw(4, 3)
    given = {"output": np.full_like(a, 7), "output_lse": np.full_like(lse, 7)}
    sides = {"prefix_output": a, "prefix_lse": lse, "suffix_output": -a, "suffix_lse": lse}
    given |= sides | change
    before = {name: np.copy(given[name]) for name in ("output", "output_lse")}
    with pytest.raises(error, match=message):
        merge_attn_states(**given)
    for name, old in before.items():
        np.testing.assert_array_equal(given[name], old)


def test_merge_attn_states_writes_two_arrays():
    memory = np.zeros(3 * 4 * 32, np.float32)
    output, output_lse = memory.reshape(3, 4, 32), memory[:12].reshape(4, 3)
    with pytest.raises(ValueError, match="output_lse: must not overlap output"):
        merge_attn_states(
            output, draw(3, 4, 32), draw(4, 3), draw(3, 4, 32), draw(4, 3), output_lse
        )


def test_merge_attn_states_where_a_side_has_no_keys():
    ((a, lse_a), _), _ = parts([(0, 20), (20, 50)], "e")
    output, output_lse = np.empty_like(a), np.empty_like(lse_a.T)
    nothing = np.full_like(lse_a.T, np.inf)  # as FlashAttention has it
    merge_attn_states(output, a, lse_a.T, np.full_like(a, np.nan), nothing, output_lse)
    np.testing.assert_allclose(output, a, rtol=1e-6)
    np.testing.assert_array_equal(output_lse, lse_a.T)


def test_partials_of_one_front_end_merge_with_those_of_another():
    """FlashInfer's in base 2, FlashAttention's in base e."""
    (first, _), (out, lse) = parts([(0, 20), (20, 50)], 2)
    (_, second), _ = parts([(0, 20), (20, 50)], "e")
    v, s = merge_state(*first, second[0], second[1] / np.float32(LN2))
    np.testing.assert_allclose(v[0], out, **CLOSE)
    output = np.empty_like(v)
    merge_attn_states(output, first[0], first[1].T * np.float32(LN2), second[0], second[1].T)
    np.testing.assert_allclose(output[0], out, **CLOSE)
    np.testing.assert_allclose(s[0], lse / LN2, **CLOSE)


def test_merges_refuse_other_shapes():
    v, s = draw(3, 4, 32), draw(3, 4)
    with pytest.raises(ValueError, match=r"^s_a: expected shape .* that of v_a without"):
        merge_state(v, s[:, :2], v, s)
    with pytest.raises(ValueError, match=r"^s_b: "):
        merge_state(v, s, v, s[:2])
    with pytest.raises(ValueError, match=r"^v_b: expected .* as in v_a"):
        merge_state(v, s, v[:2], s[:2])
    with pytest.raises(ValueError, match=r"^v_a: expected 3 axes \[seq_len"):
        merge_state(v[None], s[None], v[None], s[None])
    with pytest.raises(ValueError, match="s: must have num_states = 3"):
        merge_states(v[None], s[None, :2])
