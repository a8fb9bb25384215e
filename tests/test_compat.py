"""The other front ends against a dense softmax in float64, and partial results across them."""

import math

import ml_dtypes
import numpy as np
import pytest
from _dense import CLOSE, LN2, attend, draw, one

from numba_attn import paged_attention
from numba_attn.compat import (
    block_tables_from_csr,
    merge_state,
    scaled_dot_product_attention,
    single_decode_with_kv_cache,
)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({}, {}),
        ({"sm_scale": 0.3}, {"scale": 0.3}),
        ({"q_scale": 0.5, "k_scale": 3.0}, {"scale": 1.5 * 32**-0.5}),
        ({"logits_soft_cap": 2.0}, {"softcap": 2.0}),
        ({"logits_soft_cap": 0.0}, {}),
        ({"window_left": 9}, {"keys": np.arange(50) >= 40}),
        ({"window_left": 0}, {"keys": np.arange(50) >= 49}),
        ({"use_tensor_cores": True}, {}),
        ({"rope_scale": 1.0, "rope_theta": 1e4}, {}),
    ],
    ids=str,
)
def test_flashinfer_decode(options, rule, layout):
    q, k, v = one()
    given = (k, v) if layout == "NHD" else (k.swapaxes(0, 1).copy(), v.swapaxes(0, 1).copy())
    out, lse = single_decode_with_kv_cache(q, *given, layout, return_lse=True, **options)
    expected_out, expected_lse = attend(q, k, v, **rule)
    np.testing.assert_allclose(out, expected_out, **CLOSE)
    np.testing.assert_allclose(lse, expected_lse / LN2, **CLOSE)
    np.testing.assert_array_equal(single_decode_with_kv_cache(q, *given, layout, **options), out)


@pytest.mark.parametrize("length", [1, 50])
def test_flashinfer_alibi(length):
    """Its bias is slope * key position, which is in the lse; ours counts from the query."""
    q, k, v = one(length)
    options = {"pos_encoding_mode": "ALIBI", "return_lse": True}
    out, lse = single_decode_with_kv_cache(q, k, v, **options)
    slopes = np.array([2**-2, 2**-4, 2**-6, 2**-8])
    expected_out, expected_lse = attend(q, k, v, slopes=slopes)
    np.testing.assert_allclose(out, expected_out, **CLOSE)
    np.testing.assert_allclose(lse, (expected_lse + slopes * (length - 1)) / LN2, **CLOSE)
    assert lse.dtype == np.float32


def test_flashinfer_v_scale():
    q, k, v = one()
    out = single_decode_with_kv_cache(q, k, v, v_scale=0.5)
    np.testing.assert_allclose(out, 0.5 * attend(q, k, v)[0], **CLOSE)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"pos_encoding_mode": "ROPE_LLAMA"}, ValueError, "pos_encoding_mode: expected 'NONE'"),
        ({"kv_layout": "NDH"}, ValueError, "kv_layout"),
        (
            {"pos_encoding_mode": "ALIBI", "logits_soft_cap": 30.0},
            ValueError,
            "logits_soft_cap: not taken with pos_encoding_mode='ALIBI', got 30.0",
        ),
        ({"q": draw(1, 4, 32)}, ValueError, r"q: .*\[num_qo_heads, head_dim\]"),
        ({"k": draw(50, 32)}, ValueError, "k: "),
        ({"v": draw(49, 1, 32)}, ValueError, "v"),
        ({"window_left": None}, TypeError, "window_left: expected an integer"),
        ({"logits_soft_cap": "x"}, TypeError, "logits_soft_cap"),
        ({"sm_scale": float("nan")}, ValueError, "sm_scale"),
    ],
    ids=str,
)
def test_what_flashinfer_decode_does_not_take(change, error, message):
    q, k, v = one()
    with pytest.raises(error, match=message):
        single_decode_with_kv_cache(**({"q": q, "k": k, "v": v} | change))


@pytest.mark.parametrize("heads", [1, 4, 6, 7, 12, 32, 40])
def test_slopes_of_alibi(heads):
    """Press et al.: a geometric series for a power of two; else every second of twice as many."""
    from numba_attn.compat.flashinfer import alibi_slopes

    def series(n):
        return [2 ** (-8 * (i + 1) / n) for i in range(n)]

    power = 2 ** math.floor(math.log2(heads))
    expected = series(power) + series(2 * power)[::2][: heads - power]
    np.testing.assert_allclose(alibi_slopes(heads), expected, rtol=1e-6)


@pytest.mark.parametrize("page", [1, 5, 8, 16, 128, 256])
def test_page_tables(page):
    lens = [300, 0, 1, 2 * page]
    rng = np.random.default_rng(0)
    counts = [-(-n // page) for n in lens]
    indptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    indices = rng.permutation(indptr[-1] + 3)[: indptr[-1]].astype(np.int32)
    last = np.array([n - (c - 1) * page if c else 0 for n, c in zip(lens, counts, strict=True)])
    tables, seq_lens = block_tables_from_csr(indptr, indices, last, page)
    assert seq_lens.tolist() == lens
    k_pool, v_pool = draw(2, len(indices) + 3, page, 1, 32)
    q = draw(4, 4, 32, seed=3)
    out = paged_attention(q, k_pool, v_pool, tables, seq_lens)
    for s, n in enumerate(lens):
        pages = indices[indptr[s] : indptr[s + 1]]
        k, v = (pool[pages].reshape(-1, 1, 32)[:n] for pool in (k_pool, v_pool))
        np.testing.assert_allclose(out[s], attend(q[s], k, v)[0], **CLOSE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_indptr": [1, 2]}, "kv_indptr: must go up from 0"),
        ({"kv_indptr": [0, 9]}, "at most len.kv_indices. = 3"),
        ({"kv_indptr": [0, 2, 1]}, "kv_indptr: must go up"),
        ({"kv_indptr": []}, "kv_indptr"),
        ({"kv_last_page_len": [16, 1]}, "kv_last_page_len: must have S = 1"),
        ({"kv_last_page_len": [17]}, "from 1 to page_size = 16"),
        ({"kv_last_page_len": [0]}, "from 1 to page_size = 16"),
    ],
    ids=str,
)
def test_wrong_page_tables(change, message):
    given = {"kv_indptr": [0, 3], "kv_indices": [4, 2, 0], "kv_last_page_len": [16]}
    with pytest.raises(ValueError, match=message):
        block_tables_from_csr(**(given | change), page_size=16)


@pytest.mark.parametrize(
    ("page_size", "error"),
    [(0, ValueError), (-1, ValueError), (16.0, TypeError), (True, TypeError)],
)
def test_wrong_page_sizes(page_size, error):
    with pytest.raises(error, match="page_size: "):
        block_tables_from_csr([0, 0], [], [1], page_size)


@pytest.mark.parametrize("is_causal", [False, True])
def test_sdpa(is_causal):
    """With one query, torch's causal triangle has the first key only."""
    q, k, v = draw(2, 4, 1, 32), draw(2, 1, 50, 32, seed=1), draw(2, 1, 50, 32, seed=2)
    out = scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)
    keys = np.arange(50) < (1 if is_causal else 50)
    for s in range(2):
        expected, _ = attend(q[s, :, 0], k[s].swapaxes(0, 1), v[s].swapaxes(0, 1), keys=keys)
        np.testing.assert_allclose(out[s, :, 0], expected, **CLOSE)


def test_sdpa_scale_and_heads_of_their_own():
    q, k, v = draw(2, 4, 1, 32), draw(2, 4, 50, 32, seed=1), draw(2, 4, 50, 32, seed=2)
    out = scaled_dot_product_attention(q, k, v, scale=0.3)
    expected, _ = attend(q[1, :, 0], k[1].swapaxes(0, 1), v[1].swapaxes(0, 1), scale=0.3)
    np.testing.assert_allclose(out[1, :, 0], expected, **CLOSE)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"attn_mask": np.ones((1, 50), bool)}, ValueError, "attn_mask: masks are not taken"),
        ({"dropout_p": 0.1}, ValueError, "dropout_p: only 0.0"),
        ({"is_causal": None}, TypeError, "is_causal"),
        ({"query": draw(2, 4, 3, 32)}, ValueError, "query: expected one token"),
        ({"query": draw(2, 4, 32)}, ValueError, "query: "),
        ({"enable_gqa": False}, ValueError, "key: must have the hq = 4 heads"),
        ({"value": draw(2, 1, 49, 32)}, ValueError, "value"),
        ({"key": draw(3, 1, 50, 32)}, ValueError, "key: must have the b = 2 sequences of query"),
        ({"value": draw(1, 1, 50, 32)}, ValueError, "value: must have the b = 2 sequences"),
    ],
    ids=str,
)
def test_what_sdpa_does_not_take(change, error, message):
    given = {"query": draw(2, 4, 1, 32), "key": draw(2, 1, 50, 32), "value": draw(2, 1, 50, 32)}
    with pytest.raises(error, match=message):
        scaled_dot_product_attention(**(given | {"enable_gqa": True} | change))


def test_bfloat16_is_taken_and_given_back():
    q, k, v = (x.astype(ml_dtypes.bfloat16) for x in one())
    out = single_decode_with_kv_cache(q, k, v)
    assert out.dtype == ml_dtypes.bfloat16
    v, _ = merge_state(out[None], np.zeros((1, 4)), out[None], np.zeros((1, 4)))
    np.testing.assert_array_equal(v[0], out)
