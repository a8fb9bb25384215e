"""Number formats of q and of either pool, and the factors of what pools hold."""

import ml_dtypes
import numpy as np
import pytest
from _bound import assert_same_bits, check_answer, check_state
from _cases import (
    BFLOAT16,
    FORMATS,
    INT8_SCALE,
    Paged,
    absorb,
    attend,
    draw,
    dtype_of,
    finish,
    place,
    place_scales,
)
from _checks import check_attention

from numba_attn import _arrays, _device

TINY = _device.is_simulator()
EIGHT_BITS = FORMATS[3:]
# Each format of q, of K and of V in a few cases, as each is compiled; the others are slow.
CASES = (
    ("bfloat16", "float8_e5m2", "float8_e5m2"),
    ("float16", "float16", "float16"),
    ("float32", "float32", "float32"),
    ("float32", "float8_e4m3fn", "float8_e5m2"),
    ("float32", "float8_e5m2", "int8"),
    ("float32", "int8", "float8_e4m3fn"),
)
OTHERS = [
    (q, k, v)
    for q in FORMATS[:3]
    for i, k in enumerate(FORMATS)
    for v in (FORMATS[i], FORMATS[i - 1])
    if (q, k, v) not in CASES
]


def scaled(name):
    return INT8_SCALE if name == "int8" else 1.5


def formats_case(backend, formats, seed=0):
    lens = backend.size((37, 0, 530), (9,))
    factors = {"k_scale": scaled(formats[1]), "v_scale": scaled(formats[2])}
    return draw(lens, num_kv_heads=1, dtypes=formats, seed=seed, **factors)


@pytest.mark.parametrize("formats", CASES, ids="-".join)
def test_formats(backend, formats):
    seqs = formats_case(backend, formats)
    check_attention(backend, seqs, 16)
    out, _ = attend(backend, seqs, place(seqs, 16))
    assert out.dtype == seqs.q.dtype


@pytest.mark.slow
@pytest.mark.parametrize("formats", OTHERS, ids="-".join)
def test_other_formats(backend, formats):
    check_attention(backend, formats_case(backend, formats), 16)


@pytest.mark.parametrize("queries", [None, 1, 3])
@pytest.mark.parametrize("tokens", [1, 2, 17])
def test_few_tokens_in_any_format(backend, queries, tokens):
    """Case 25: wrong only for one dtype at one length."""
    gqa = backend.size(2, 1)
    for formats in CASES[1 : backend.size(4, 2)]:
        seqs = draw((tokens,), gqa=gqa, num_kv_heads=1, dtypes=formats, queries=queries, scale=0.05)
        check_answer(seqs, attend(backend, seqs, place(seqs, 16)))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_finalize_writes_any_float(backend, dtype):
    seqs = draw((9, 0), num_kv_heads=1)
    state = absorb(backend, seqs, place(seqs, 4))
    out, lse = backend.finalize(state, dtype=dtype, return_lse=True)
    assert out.dtype == dtype
    check_answer(seqs, type(attend(backend, seqs, place(seqs, 4)))(out, lse))


def test_uint16_is_bfloat16_in_every_place(twin):
    seqs = draw((9, 5), num_kv_heads=1)
    paged = place(seqs, 4)
    expected = attend(twin, seqs, paged)
    for bits in ((1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1)):
        arrays = [
            x.view(np.uint16) if view else x
            for x, view in zip((seqs.q, *paged[:2]), bits, strict=True)
        ]
        out, lse = twin.paged_attention(*arrays, *paged[2:], return_lse=True)
        assert out.dtype == (np.uint16 if bits[0] else BFLOAT16)
        assert_same_bits((out.view(np.uint16), expected.out.view(np.uint16)), (lse, expected.lse))


def codes(dtype):
    return np.arange(256, dtype=np.uint8).view(dtype_of(dtype))


@pytest.mark.parametrize("dtype", EIGHT_BITS)
def test_every_code_of_a_value_widens_exactly(backend, dtype):
    """One token has weight 1: out is its value, and bfloat16 holds what 8 bits hold."""
    values = codes(dtype).reshape(8, 1, 1, 32)

    def fill(q, keys, rows):
        for v, row in zip(rows, values, strict=True):
            v[:] = row

    gqa = backend.size(2, 1)
    dtypes = ("bfloat16", dtype, dtype)
    seqs = draw((1,) * 8, num_kv_heads=1, gqa=gqa, dtypes=dtypes, scale=0.01).map(fill)
    out, _ = attend(backend, seqs, place(seqs, 1))
    expected = np.repeat(values[:, 0].astype(np.float32), gqa, axis=1)
    np.testing.assert_array_equal(out.astype(np.float32), expected)


KEY_CASES = [("bfloat16", x, x) for x in EIGHT_BITS] + list(() if TINY else CASES[3:])


@pytest.mark.parametrize("formats", KEY_CASES, ids="-".join)
def test_every_code_of_a_key_widens_exactly(backend, formats):
    """Where q is a unit vector and the rest of the key 0, the lse of one token is the code."""
    code = np.arange(256)[backend.size(slice(None), slice(7, None, 8))]
    keys = codes(formats[1])
    gqa = backend.size(2, 1)
    seqs = draw((1,) * len(code), num_kv_heads=1, gqa=gqa, dtypes=formats, scale=1.0)
    for column in (code % 32, (code // 8 + 7) % 32)[: backend.size(2, 1)]:

        def fill(q, rows, values, column=column):
            q[:] = 0
            for s, row in enumerate(rows):
                q[s, :, column[s]], row[:], row[..., column[s]] = 1, keys[0], keys[code[s]]

        case = seqs.map(fill)
        _, lse = attend(backend, case, place(case, 1))
        expected = keys[code].astype(np.float32)
        expected[np.isposinf(expected)] = np.nan  # as ever, for a logit of +inf
        np.testing.assert_array_equal(lse, np.repeat(expected[:, None], gqa, axis=1))


def test_every_float16_widens_exactly(cpu):
    values = np.arange(2**16, dtype=np.uint16).view(np.float16).reshape(-1, 1, 1, 32)

    def fill(q, keys, rows):
        for v, row in zip(rows, values, strict=True):
            v[:] = row

    seqs = draw((1,) * len(values), num_kv_heads=1, dtypes="float16", scale=1e-3).map(fill)
    out, _ = attend(cpu, seqs, place(seqs, 1))
    np.testing.assert_array_equal(*(x.astype(np.float32) for x in (out[:, :1], values[:, 0])))


# Factors


@pytest.mark.parametrize("dtype", ["bfloat16", *EIGHT_BITS])
def test_k_scale_is_a_factor_of_the_logits(twin, dtype):
    lens = twin.size((530, 9), (9,))
    seqs = draw(lens, num_kv_heads=1, dtypes=("bfloat16", dtype, dtype), k_scale=0.5, scale=0.2)
    rescaled = seqs.but(k_scale=None, scale=0.1)
    paged = place(seqs, 4)
    states = [twin.read(absorb(twin, case, paged)) for case in (seqs, rescaled)]
    assert_same_bits(*zip(*states, strict=True))
    check_state(seqs, states[0])


@pytest.mark.parametrize("dtype", ["bfloat16", *EIGHT_BITS])
def test_v_scale_is_a_factor_of_the_output(twin, dtype):
    """In one split exactly: m and l are unchanged, and o is 3 o."""
    lens = twin.size((512, 9), (9,))
    seqs = draw(lens, num_kv_heads=1, dtypes=("bfloat16", dtype, dtype), v_scale=3.0, scale=0.02)
    paged = place(seqs, 4)
    m, l, o = twin.read(absorb(twin, seqs.but(v_scale=None), paged))
    state = absorb(twin, seqs, paged)
    assert_same_bits(*zip(twin.read(state), (m, l, np.float32(3) * o), strict=True))
    check_answer(seqs, finish(twin, seqs, state))


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_a_factor_for_each_head_is_that_heads(twin, name):
    """Two kv heads with factors of their own: each has the bits of the call with its factor."""
    seqs = draw((17, 3), num_kv_heads=2, gqa=twin.size(2, 1))
    paged = place(seqs, 4)
    both = attend(twin, seqs, paged, **{name: np.array([0.5, 3.0])})
    for kv, factor in enumerate((0.5, 3.0)):
        one = attend(twin, seqs, paged, **{name: factor})
        heads = np.s_[:, kv * seqs.q.shape[1] // 2 : (kv + 1) * seqs.q.shape[1] // 2]
        assert_same_bits((both.out[heads], one.out[heads]), (both.lse[heads], one.lse[heads]))


def test_factors_of_tokens(backend):
    """Each token's own, NaN where no token is, and not those of another block or head."""
    lens = backend.size((70, 0, 530), (9, 0))
    seqs = draw(lens, num_kv_heads=2, gqa=backend.size(2, 1), token_scales=True)
    check_attention(backend, seqs, 4)


def test_equal_factors_of_tokens_are_one_factor(twin):
    """Powers of two are exact wherever they are multiplied in."""
    seqs = draw((37, 3), num_kv_heads=1, k_scale=0.25, v_scale=4.0)
    paged = place(seqs, 4)
    tokens = tuple(np.ones((n, 1), np.float32) for n in seqs.lens)
    by_token = seqs.but(
        k_scale=None,
        v_scale=None,
        key_scales=tuple(x / 4 for x in tokens),
        value_scales=tuple(x * 4 for x in tokens),
    )
    answers = [attend(twin, case, paged) for case in (seqs, by_token)]
    assert_same_bits(*zip(*answers, strict=True))
    check_answer(seqs, answers[0])


@pytest.mark.parametrize("which", ["keys", "values"])
def test_only_one_pool_has_factors_of_tokens(backend, which):
    seqs = draw((21, 3), num_kv_heads=1, token_scales=True)
    if which == "keys":
        seqs = seqs.but(value_scales=None, v_scale=3.0)
    else:
        seqs = seqs.but(key_scales=None, k_scale=np.float32([0.5]))
    check_attention(backend, seqs, 4)


def strided(scales):
    """Give the same scales in layouts that caches have."""
    head_major = np.ascontiguousarray(scales.swapaxes(1, 2)).swapaxes(1, 2)
    combined = np.full((len(scales), 2, *scales.shape[1:]), np.nan, np.float32)
    combined[:, 1] = scales
    backwards = np.ascontiguousarray(scales[::-1, ::-1, ::-1])[::-1, ::-1, ::-1]
    every_other = scales.repeat(3, axis=2)[:, :, ::3]
    return head_major, combined[:, 1], backwards, every_other


def test_strides_of_factors_change_no_bit(twin):
    seqs = draw((21, 3), num_kv_heads=2, gqa=twin.size(2, 1), token_scales=True)
    paged = place(seqs, 4)
    k_scale, v_scale = (place_scales(x, paged) for x in (seqs.key_scales, seqs.value_scales))
    expected = attend(twin, seqs, paged)
    k_scales, v_scales = strided(k_scale), strided(v_scale)
    for k_view, v_view in zip(k_scales, v_scales[1:] + v_scales[:1], strict=True):
        k_view.flags.writeable = False
        answer = attend(twin, seqs, paged, k_scale=k_view, v_scale=v_view)
        assert_same_bits(*zip(answer, expected, strict=True))
    one_for_all = np.broadcast_to(np.float32(0.5), k_scale.shape)
    answers = [attend(twin, seqs, paged, k_scale=scale) for scale in (one_for_all, 0.5)]
    for part in range(2):
        np.testing.assert_allclose(
            *(np.asarray(answer[part], np.float64) for answer in answers), rtol=2**-7, atol=1e-2
        )


@pytest.mark.parametrize("factor", [2.0**-60, 2.0**60])
def test_huge_and_tiny_factors(backend, factor):
    """What comes out is what counts: factors that undo what is in the pools."""

    def shrink(q, keys, values):
        for x in (*keys, *values):
            x *= x.dtype.type(1 / factor)

    seqs = draw((21,), num_kv_heads=1, k_scale=factor, v_scale=factor).map(shrink)
    check_attention(backend, seqs, 4)


# DeepSeek's latent cache: one kv head, V a part of K


def latent(lens, gqa, head_dim, v_head_dim, **options):
    """Make a case whose values are the first columns of its keys."""
    seqs = draw(lens, gqa=gqa, num_kv_heads=1, head_dim=head_dim, v_head_dim=v_head_dim, **options)
    return seqs.but(values=tuple(keys[..., :v_head_dim] for keys in seqs.keys))


def check_latent(backend, seqs, block_size):
    copied = place(seqs, block_size)
    v_head_dim = seqs.values[0].shape[2]
    paged = copied._replace(v_pool=copied.k_pool[..., :v_head_dim])
    answer = attend(backend, seqs, Paged(*paged))
    check_answer(seqs, answer)
    assert answer.out.shape == (*seqs.q.shape[:-1], v_head_dim)
    assert_same_bits(*zip(answer, attend(backend, seqs, copied), strict=True))


@pytest.mark.parametrize("queries", [None, 2])
def test_values_may_be_a_view_of_the_keys(backend, queries):
    gqa = backend.size(16, 2)
    check_latent(backend, latent(backend.size((70, 5), (9,)), gqa, 40, 24, queries=queries), 4)


@pytest.mark.slow
@pytest.mark.parametrize("gqa", [16, 128])
def test_deepseek(cpu, gqa):
    lens = (4096,) * 4 if gqa == 16 else (700,)
    check_latent(cpu, latent(lens, gqa, 576, 512, scale=0.07), 64)


def test_value_dim_of_its_own(backend):
    lens = backend.size((37, 0), (5,))
    seqs = draw(lens, gqa=1, num_kv_heads=1, head_dim=1, v_head_dim=33)
    check_attention(backend, seqs, 4)


def test_formats_are_all_that_the_package_takes():
    assert tuple(_arrays.CARRIERS) == FORMATS
    assert {dtype_of(name).itemsize for name in EIGHT_BITS} == {1}
    assert dtype_of("float8_e5m2") == ml_dtypes.float8_e5m2


def test_scales_of_tokens_magnify_what_the_pair_dot_product_would_flush(cpu):
    """q . k is subnormal, and the tokens' scales make moderate logits of it."""
    rng = np.random.default_rng(0)
    q = (rng.standard_normal((1, 2, 32)) * 2.0**-120).astype(ml_dtypes.bfloat16)
    keys = (rng.standard_normal((20, 1, 1, 32)) * 2.0**-7).astype(ml_dtypes.float8_e5m2)
    values, table = np.ones(keys.shape, np.float32), np.arange(20)[None]
    tokens = np.full(keys.shape[:3], 2.0**127, np.float32)
    lse = cpu.paged_attention(
        q, keys, values, table, [20], scale=1.0, k_scale=tokens, return_lse=True
    )[1]
    logits = q.astype(float)[0] @ keys.astype(float)[:, 0, 0].T * 2.0**127
    np.testing.assert_allclose(lse[0], np.log(np.exp(logits).sum(axis=1)), rtol=1e-4)
