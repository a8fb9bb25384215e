"""The CPU twin's vector building blocks against NumPy, over odd sizes."""

import dataclasses
import functools

import _backends
import ml_dtypes
import numba
import numpy as np
import pytest
from _bound import assert_same_bits, check_answer
from _cases import attend, draw, place

from numba_attn.kernels import _formats, _vector, logits, rows, simd

SIZES = [1, 2, 13, 31, 32, 33, 48, 63, 80, 113]
RATIOS = [1, 2, 3, 4, 5, 7, 8, 9, 16, 19]
EPS = 2.0**-24


def bfloat16(rng, *shape):
    return rng.standard_normal(shape).astype(ml_dtypes.bfloat16)


def address(array):
    return array.ctypes.data


def row_order(array, format=_formats.BFLOAT16):
    """Permute float32 [..., D] into chunks of [16 even, 16 odd], or of two halves; zero-padded."""
    size = array.shape[-1]
    wide = np.zeros((*array.shape[:-1], rows.padded(size)), np.float32)
    wide[..., :size] = array
    if not _formats.FORMATS[format].paired:
        return wide
    chunks = wide.reshape(*array.shape[:-1], -1, 16, 2)
    return np.ascontiguousarray(chunks.swapaxes(-1, -2)).reshape(wide.shape)


def stored(values, format):
    """Round values to a number format."""
    name = _formats.FORMATS[format].name
    kept = np.clip(np.rint(values), -128, 127) if name == "int8" else values
    return kept.astype(np.dtype(getattr(ml_dtypes, name, name)))


def head_lanes(gqa):
    """Return for each head its tile and its lanes in a vector of a group's logits."""
    tokens = logits.tile_tokens(gqa)
    for head in range(gqa):
        tile, g = divmod(head, logits.TILE_HEADS)
        heads = min(logits.TILE_HEADS, gqa - tile * logits.TILE_HEADS)
        padded = logits.padded_heads(heads)
        yield tile, padded, [i for i in range(16) if i // tokens % padded == g]


def logits_of(gqa, vectors, head):
    """Read one head's 16 logits out of the group's vectors."""
    tokens = logits.tile_tokens(gqa)
    tile, padded, _ = list(head_lanes(gqa))[head]
    flat = vectors[tile * logits.TILE_HEADS * 16 :][: padded * 16]
    return flat.reshape(16 // tokens, padded, tokens)[:, head % logits.TILE_HEADS].reshape(16)


@functools.cache
def kernel(name, *sizes):
    """Compile a call of a building block with literal sizes."""
    block = next(vars(module)[name] for module in (simd, logits, rows) if name in vars(module))
    arguments = {
        "widen": "row, out",
        "pack": "row, out",
        "natural_order": "row, factor, out",
        "score": "q, pairs, rows, ahead, offset, tile, logits",
        "absorb": "logits, count, m, l, rescale, scale, cap, slopes, distance, scales",
        "accumulate": "p, first, rows, ahead, offset, rescale, o",
        "store_state": "m, l, out_m, out_l",
    }[name]
    literals = ", ".join(map(str, sizes))
    scope = {"block": block}
    exec(f"def call({arguments}):\n    return block({arguments}, {literals})", scope)
    return numba.njit(scope["call"])


FORMATS = range(len(_formats.FORMATS))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("size", SIZES)
def test_widen_and_natural_order(size, format):
    row = stored(10 * np.random.default_rng(size).standard_normal(size), format)
    factor = _formats.FORMATS[format].factor
    wide = np.full(rows.padded(size) + 1, np.nan, np.float32)
    kernel("widen", size, format, format)(address(row), address(wide))
    expected = row_order(row.astype(np.float32) / np.float32(factor), format)
    np.testing.assert_array_equal(wide[:-1], expected)
    assert np.isnan(wide[-1])
    back = np.full(size + 1, np.nan, np.float32)
    kernel("natural_order", size, format)(address(wide), np.float32(factor), address(back))
    np.testing.assert_array_equal(back[:-1], row.astype(np.float32))
    assert np.isnan(back[-1])


@pytest.mark.parametrize("order", [_formats.BFLOAT16, _formats.number("float32")])
@pytest.mark.parametrize("source", [0, 1, 2])
def test_widen_into_the_order_of_another_format(source, order):
    row = stored(np.random.default_rng(source).standard_normal(45), source)
    wide = np.empty(rows.padded(45), np.float32)
    kernel("widen", 45, source, order)(address(row), address(wide))
    np.testing.assert_array_equal(wide, row_order(row.astype(np.float32), order))


CODES = {name: np.arange(256, dtype=np.uint8) for name in ("float8_e4m3fn", "float8_e5m2", "int8")}
CODES |= {name: np.arange(2**16, dtype=np.uint16) for name in ("float16", "bfloat16")}


@pytest.mark.parametrize("has_half", [True, False])
@pytest.mark.parametrize("name", CODES)
def test_every_code_is_widened_exactly(name, has_half, monkeypatch):
    """NaN is NaN; also without instructions for float16."""
    if has_half and not _formats._has_half():
        pytest.skip("the CPU that this is compiled for has no instructions for float16")
    monkeypatch.setattr(_formats, "_has_half", lambda: has_half)
    kernel.cache_clear()
    format = _formats.number(name)
    row = CODES[name].view(np.dtype(getattr(ml_dtypes, name, name)))
    wide = np.empty(1024, np.float32)
    to_natural = _formats.number("float32")
    for part in np.split(row, max(1, row.size // 1024)):
        call = kernel("widen", part.size, format, to_natural)
        call(address(part), address(wide))
        with np.errstate(invalid="ignore"):
            expected = part.astype(np.float32)
            got = wide[: part.size] * np.float32(_formats.FORMATS[format].factor)
        np.testing.assert_array_equal(got, expected)
        assert (np.signbit(got) == np.signbit(expected))[~np.isnan(expected)].all()
    kernel.cache_clear()


needs_pair_dot = pytest.mark.skipif(
    not _vector.has_pair_dot(), reason="this CPU (or LLVM) has no AVX512-BF16"
)


@pytest.mark.parametrize(("gqa", "size"), [*((g, 33) for g in RATIOS), *((4, d) for d in SIZES)])
@pytest.mark.parametrize("dot", [0, pytest.param(1, marks=needs_pair_dot)])
def test_score(gqa, size, dot):
    check_score(gqa, size, _formats.BFLOAT16, dot)


@pytest.mark.parametrize("format", FORMATS[1:])
def test_score_of_other_formats(format):
    check_score(4, 45, format, 0)


@needs_pair_dot
@pytest.mark.parametrize("format", [f for f in FORMATS[1:] if _formats.has_pairs(f)])
@pytest.mark.parametrize("size", [32, 45])
def test_score_of_pairs_of_other_formats(format, size):
    check_score(4, size, format, 1)


@needs_pair_dot
@pytest.mark.parametrize("name", _formats.PAIR_TABLES)
def test_pairs_have_every_code(name):
    """One key per code: its logit with q = 1 is the code's number."""
    codes = np.arange(256, dtype=np.uint8)
    pairs, wide_q = np.ones((1, 32), ml_dtypes.bfloat16), np.ones((1, 32), np.float32)
    pairs[:, 1:] = 0
    keys = np.zeros((256, 32), np.uint8)
    keys[:, 0] = codes
    scores = np.empty(logits.logits_size(1), np.float32)
    call = kernel("score", 1, 32, _formats.number(name), 1)
    row_list = np.array([address(key) for key in keys], np.int64)
    expected = codes.view(getattr(ml_dtypes, name)).astype(np.float32)
    for first in range(0, 256, 16):
        for tile in range(4):
            here = address(row_list[first + 4 * tile :])
            call(address(wide_q), address(pairs), here, here, 0, tile, address(scores))
        got = scores[:16] * np.float32(_formats.FORMATS[_formats.number(name)].factor)
        np.testing.assert_array_equal(got, expected[first : first + 16])


def check_score(gqa, size, format, dot):
    rng = np.random.default_rng(gqa * 1000 + size)
    q, k = bfloat16(rng, gqa, size), stored(3 * rng.standard_normal((16, 3, size)), format)
    wide_q = row_order(q.astype(np.float32), format)
    pairs = np.zeros((gqa, rows.padded(size)), ml_dtypes.bfloat16)
    pairs[:, :size] = q
    row_list = np.array([address(k[t]) for t in range(16)], np.int64)
    scores = np.full(logits.logits_size(gqa), np.nan, np.float32)
    tokens, offset = logits.tile_tokens(gqa), 2 * k.itemsize * size  # the third kv head
    rows_at = [address(wide_q), address(pairs) if dot else 0]
    for tile in range(16 // tokens):
        here = address(row_list[tile * tokens :])
        call = kernel("score", gqa, size, format, dot)
        call(*rows_at, here, here, offset, tile, address(scores))
    scores *= np.float32(_formats.FORMATS[format].factor)
    exact = q.astype(np.float64) @ k[:, 2].astype(np.float64).T
    magnitude = abs(q.astype(float)) @ abs(k[:, 2].astype(float)).T
    bound = (rows.padded(size) / 16 + 5) * EPS * magnitude
    for head in range(gqa):
        assert (abs(logits_of(gqa, scores, head) - exact[head]) <= bound[head]).all()


@pytest.mark.parametrize("size", SIZES)
def test_pack(size):
    row = bfloat16(np.random.default_rng(size), size)
    packed = np.full(rows.padded(size) + 1, 7, ml_dtypes.bfloat16)
    assert kernel("pack", size)(address(row), address(packed)) == 1
    assert packed[:size].tobytes() == row.tobytes()
    assert (packed[size:-1] == 0).all()
    assert packed[-1] == 7


@pytest.mark.parametrize("value", [0.0, -0.0, 2.0**-126, -(2.0**60)])
def test_pack_calls_a_row_tame(value):
    row = np.array([1, 1, value], ml_dtypes.bfloat16)
    packed = np.empty(rows.padded(3), ml_dtypes.bfloat16)
    assert kernel("pack", 3)(address(row), address(packed)) == 1


@pytest.mark.parametrize("value", [2.0**-127, -(2.0**-133), 2.0**61, np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("place", [0, 31, 33])
def test_pack_sees_what_is_not_tame(value, place):
    row = np.ones(34, ml_dtypes.bfloat16)
    row[place] = value
    packed = np.empty(rows.padded(34), ml_dtypes.bfloat16)
    assert kernel("pack", 34)(address(row), address(packed)) == 0


def absorb(gqa, scores, count, state, scale=1.0, *, cap=None, slopes=None, distance=0, scales=None):
    """Call the building block; slopes [gqa], scales [2, 16]."""
    given = [cap, slopes, scales]
    used = sum(bit for bit, x in zip((1, 2, 4), given, strict=True) if x is not None)
    lanes = np.zeros((logits.head_tiles(gqa), 16), np.float32)
    if slopes is not None:
        lanes.flat = np.asarray(slopes, np.float32)[logits.head_of_lanes(gqa)]
    scales = np.zeros((2, 16)) if scales is None else scales
    scales = np.asarray(scales, np.float32)
    kernel("absorb", gqa, used)(
        address(scores),
        np.int32(count),
        *(address(x) for x in state),
        np.float32(scale),
        np.float32(cap or 0),
        address(lanes),
        np.int32(distance),
        address(scales),
    )


def fresh_state(gqa):
    shape = logits.head_tiles(gqa), 16
    return [np.full(shape, x, np.float32) for x in (-np.inf, 0, np.nan)]


@pytest.mark.parametrize("gqa", RATIOS)
def test_absorb_shapes_logits(gqa):
    """Scale by token, cap, bias, in this order; values scaled by token, the sum of weights not."""
    rng = np.random.default_rng(gqa)
    scores = rng.standard_normal(logits.logits_size(gqa)).astype(np.float32)
    before = np.array([logits_of(gqa, scores, h) for h in range(gqa)], np.float64)
    slopes = 2.0 ** -np.arange(1, gqa + 1)
    scales = rng.uniform(0.5, 2, (2, 16)).astype(np.float32)
    m, l, rescale = fresh_state(gqa)
    absorb(
        gqa, scores, 16, (m, l, rescale), 3.0, cap=2.5, slopes=slopes, distance=-20, scales=scales
    )
    s = 2.5 * np.tanh(3.0 * before * scales[0].astype(np.float64) / 2.5)
    s += slopes[:, None] * (np.arange(16) - 20)
    p = np.exp(s - s.max(axis=1, keepdims=True))
    for h, (tile, _, lanes) in enumerate(head_lanes(gqa)):
        np.testing.assert_allclose(m[tile, lanes], s[h].max(), rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(l[tile, lanes].sum(), p[h].sum(), rtol=1e-6)
        np.testing.assert_allclose(logits_of(gqa, scores, h), p[h] * scales[1], rtol=3e-6)


@pytest.mark.parametrize("cap", [1e-3, 1.0, 30.0, 1e4])
def test_softcap_is_exact_near_0_and_bounded(cap):
    """Within 4 ulp of tanh also where tanh(x) is nearly x; the state's maximum shows the logit."""
    magnitudes = np.geomspace(1e-30, 1e3, 400) * cap
    for s in np.concatenate([magnitudes, -magnitudes, [0.0, np.inf, -np.inf]]).astype(np.float32):
        scores = np.full(16, s, np.float32)
        m, l, rescale = fresh_state(1)
        absorb(1, scores, 1, (m, l, rescale), cap=cap)
        expected = np.float32(cap) * np.tanh(np.float64(s) / np.float32(cap))
        assert abs(m[0, 0] - expected) <= 10 * EPS * abs(expected)


@pytest.mark.parametrize("gqa", RATIOS)
@pytest.mark.parametrize("count", [1, 5, 16])
def test_absorb(gqa, count):
    rng = np.random.default_rng(gqa * 100 + count)
    scale, tiles = np.float32(0.25), logits.head_tiles(gqa)
    raw = (40 * rng.standard_normal(logits.logits_size(gqa))).astype(np.float32)
    before = [logits_of(gqa, raw, h).astype(np.float64) * 0.25 for h in range(gqa)]
    poisoned = raw.copy()
    marks = np.arange(len(raw), dtype=np.float32)
    for h in range(gqa):  # what lies past the count is poison
        for mark in logits_of(gqa, marks, h)[count:]:
            poisoned[int(mark)] = np.nan
    m = np.full((tiles, 16), -np.inf, np.float32)
    m_old = np.where(np.arange(gqa) % 2, 3.0, -np.inf)
    l = np.zeros((tiles, 16), np.float32)
    for h, (tile, _, lanes) in enumerate(head_lanes(gqa)):
        m[tile, lanes] = m_old[h]
        l[tile, lanes] = 0 if m_old[h] == -np.inf else 0.5
    rescale = np.full((tiles, 16), np.nan, np.float32)
    absorb(gqa, poisoned, count, (m, l, rescale), scale)
    for h, (tile, _, lanes) in enumerate(head_lanes(gqa)):
        s = before[h][:count]
        m_new = max(m_old[h], s.max())
        p = logits_of(gqa, poisoned, h)
        expected = np.exp(s - m_new)
        assert (m[tile, lanes] == np.float32(m_new)).all()
        # s - m is rounded, then exp within 2 ulp; below 2^-126 it is 0.
        bound = (abs(s - m_new) + 4) * EPS * expected + 2.0**-126
        assert (abs(p[:count] - expected) <= bound).all()
        assert (p[count:] == 0).all()
        factor = 0.0 if m_old[h] == -np.inf else np.exp(m_old[h] - m_new)
        np.testing.assert_allclose(rescale[tile, lanes], factor, rtol=1e-5)
        start = 0.0 if m_old[h] == -np.inf else 0.5 * len(lanes)
        np.testing.assert_allclose(l[tile, lanes].sum(), start * factor + expected.sum(), rtol=1e-5)


def test_absorb_survives_logits_of_minus_infinity_and_shows_nan():
    m, l, rescale = (np.full((1, 16), x, np.float32) for x in (-np.inf, 0, np.nan))
    scores = np.full(logits.logits_size(1), -np.inf, np.float32)
    absorb(1, scores, 16, (m, l, rescale))
    assert (scores == 0).all()
    assert (m == -np.inf).all()
    assert (l == 0).all()
    scores[:] = 1
    scores[3] = np.nan
    absorb(1, scores, 16, (m, l, rescale))
    assert np.isnan(scores[3])
    assert np.isnan(l.sum())
    assert (m == 1).all()


@pytest.mark.parametrize(("gqa", "size"), [*((g, 48) for g in RATIOS), *((7, d) for d in SIZES)])
@pytest.mark.parametrize("count", [1, 8])
def test_accumulate(gqa, size, count):
    check_accumulate(gqa, size, count, _formats.BFLOAT16)


@pytest.mark.parametrize("format", FORMATS[1:])
@pytest.mark.parametrize("count", [1, 8])
def test_accumulate_other_formats(count, format):
    check_accumulate(7, 45, count, format)


def check_accumulate(gqa, size, count, format):
    rng = np.random.default_rng(gqa * 1000 + size + count)
    first = 11 if count == 1 else 8
    v = stored(3 * rng.standard_normal((16, 2, size)), format)
    factor = np.float32(_formats.FORMATS[format].factor)
    row_list = np.array([address(v[t]) for t in range(16)], np.int64)
    weights = rng.random(logits.logits_size(gqa)).astype(np.float32)
    o = rng.standard_normal((gqa, size)).astype(np.float32)
    rescale = np.zeros((logits.head_tiles(gqa), 16), np.float32)
    factors = rng.random(gqa).astype(np.float32)
    for h, (tile, _, lanes) in enumerate(head_lanes(gqa)):
        rescale[tile, lanes] = factors[h]
    sums, offset = row_order(o / factor, format), v.itemsize * size  # the second kv head
    kernel("accumulate", gqa, size, format, count)(
        address(weights),
        first,
        address(row_list[first:]),
        address(row_list[first:]),
        offset,
        address(rescale),
        address(sums),
    )
    back = np.empty((gqa, size), np.float32)
    for h in range(gqa):
        kernel("natural_order", size, format)(address(sums[h]), factor, address(back[h]))
    used = slice(first, first + count)
    p = np.array([logits_of(gqa, weights, h)[used] for h in range(gqa)], np.float64)
    expected = o * factors[:, None].astype(np.float64) + p @ v[used, 1].astype(np.float64)
    bound = (count + 2) * EPS * (abs(o) * factors[:, None] + p @ abs(v[used, 1].astype(float)))
    assert (abs(back - expected) <= bound).all()


@pytest.mark.parametrize("gqa", RATIOS)
def test_store_state(gqa):
    rng = np.random.default_rng(gqa)
    l = rng.random((logits.head_tiles(gqa), 16)).astype(np.float32)
    m = np.zeros_like(l)
    for h, (tile, _, lanes) in enumerate(head_lanes(gqa)):
        m[tile, lanes] = h
    out_m, out_l = (np.full(gqa + 1, np.nan, np.float32) for _ in range(2))
    kernel("store_state", gqa)(*(address(x) for x in (m, l, out_m, out_l)))
    np.testing.assert_array_equal(out_m[:-1], np.arange(gqa))
    sums = [l[tile, lanes].sum(dtype=np.float64) for tile, _, lanes in head_lanes(gqa)]
    np.testing.assert_allclose(out_l[:-1], sums, rtol=16 * EPS)
    assert np.isnan(out_m[-1])
    assert np.isnan(out_l[-1])


def test_a_row_of_subnormal_queries_changes_no_other_row():
    """Rows take the pair dot product or not by their own q: alone, in a batch, the same bits."""

    def subnormal(q, keys, values):
        q[1] *= ml_dtypes.bfloat16(2.0**-120)
        q[1, :, ::2] = ml_dtypes.bfloat16(2.0**-130)
        keys[1][:] = (keys[1].astype(np.float32) * 2.0**124).astype(keys[1].dtype)

    seqs = dataclasses.replace(draw((40, 600, 40), num_kv_heads=2).map(subnormal), scale=1.0)
    cpu = _backends.get("cpu")
    together = attend(cpu, seqs, place(seqs, 16))
    check_answer(seqs, together)
    for row in range(3):
        alone = attend(cpu, seqs.rows(row), place(seqs.rows(row), 16))
        assert_same_bits((together.out[[row]], alone.out), (together.lse[[row]], alone.lse))


@pytest.mark.parametrize("exponent", [5, 6])
def test_exp_is_within_2_ulp(exponent):
    """Exact differences s - m, so that nothing but the exponential errs."""
    rng = np.random.default_rng(exponent)
    m, l, rescale = (np.full((1, 16), x, np.float32) for x in (-np.inf, 0, np.nan))
    for _ in range(200):
        weights = -(rng.integers(0, 2**22, 16) * 2.0 ** (exponent - 22)).astype(np.float32)
        weights[0] = 0
        expected = np.exp(weights.astype(np.float64))
        absorb(1, weights, 16, (m, l, rescale))
        assert (abs(weights - expected) <= 4 * EPS * expected).all()


@pytest.mark.parametrize(
    ("q", "k", "scale"),
    [
        (2.0**-126, 0.9, 2.0**124),
        (1.0, 2.0**-130, 2.0**126),
        (2.0**60, 2.0**-130, 1e20),
        (2.0**-63, 2.0**-64, 1e37),
    ],
)
def test_a_large_scale_shows_no_subnormals(q, k, scale):
    """The pair dot product counts subnormals as 0: a scale that would show it goes without."""
    seqs = draw((40,), num_kv_heads=1, head_dim=64)

    def magnify(queries, keys, values):
        queries[:] = q
        keys[0][:] = k * np.sign(keys[0].astype(np.float32))

    seqs = dataclasses.replace(seqs.map(magnify), scale=scale)
    check_answer(seqs, attend(_backends.get("cpu"), seqs, place(seqs, 16)))
