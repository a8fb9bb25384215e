"""The scalar roundings from float32, and the scalar pieces of options, on both twins."""

import math

import ml_dtypes
import numba
import numpy as np
import pytest

from numba_attn.kernels import recurrence

LOW_HALVES = (0, 1, 0x0FFF, 0x1000, 0x1001, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF)
SATURATING = ("float8_e4m3fn", "float8_e5m2")
FLOATS = {
    "bfloat16": (recurrence.round_to_bfloat16, np.uint16),
    "float16": (recurrence.round_to_float16, np.uint16),
    "float8_e4m3fn": (recurrence.round_to_float8_e4m3fn, np.uint8),
    "float8_e5m2": (recurrence.round_to_float8_e5m2, np.uint8),
}


def patterns():
    """Every upper half of a float32, with lower halves around the ties, and random ones."""
    upper = np.arange(1 << 16, dtype=np.uint32)[:, None] << np.uint32(16)
    chance = np.random.default_rng(0).integers(0, 1 << 16, (1 << 16, 6), np.uint32)
    return np.concatenate([upper | np.array(LOW_HALVES, np.uint32), upper | chance], 1).ravel()


def ties(dtype):
    """Return every code's value, the midpoint to the next one, and both neighbours of that."""
    codes = np.arange(1 << 8 * dtype.itemsize, dtype=f"u{dtype.itemsize}").view(dtype)
    with np.errstate(invalid="ignore"):  # signalling NaN
        values = codes.astype(np.float32)
    values = np.unique(values[np.isfinite(values)])
    middles = values[:-1] / 2 + values[1:] / 2
    around = np.nextafter(middles, np.float32(-np.inf)), np.nextafter(middles, np.float32(np.inf))
    with np.errstate(over="ignore"):
        beyond = np.outer([-1, 1], [2**17, 1e30, np.inf]).astype(np.float32).ravel()
    return np.concatenate([values, middles, *around, beyond]).view(np.uint32)


def convert(x, name):
    """Round with NumPy or ml_dtypes, float8 saturating."""
    dtype = np.dtype(name) if name == "float16" else np.dtype(getattr(ml_dtypes, name))
    if name in SATURATING:
        most = np.float32(ml_dtypes.finfo(dtype).max)
        x = np.clip(x, -most, most)
    with np.errstate(over="ignore", invalid="ignore"):
        return x.astype(dtype)


def check(name, bits, codes):
    x = bits.view(np.float32)
    expected = convert(x, name)
    codes, nan = codes.view(expected.dtype), np.isnan(x)
    assert codes[~nan].tobytes() == expected[~nan].tobytes()
    np.testing.assert_array_equal(np.isnan(codes.astype(np.float32)), nan)
    np.testing.assert_array_equal(np.signbit(codes[nan]), np.signbit(x[nan]))


@pytest.mark.parametrize("name", FLOATS)
def test_every_pattern_rounds_to_nearest_even(name):
    function, carrier = FLOATS[name]

    @numba.njit
    def round_all(bits, codes):
        for i in range(len(bits)):
            codes[i] = function(bits[i])

    dtype = convert(np.float32([0]), name).dtype
    for bits in (patterns(), ties(dtype)):
        codes = np.empty(len(bits), carrier)
        round_all(bits, codes)
        check(name, bits, codes)


def expected_int8(x):
    with np.errstate(invalid="ignore"):  # signalling NaN
        whole = np.rint(np.clip(x.astype(np.float64), -128, 127))
    return np.where(np.isnan(whole), 0, whole).astype(np.int8)


def test_int8():
    @numba.njit
    def round_all(x, codes):
        for i in range(len(x)):
            codes[i] = recurrence.round_to_int8(x[i])

    halves = np.arange(-600, 600, dtype=np.float32) / 4
    near = np.nextafter(halves, np.float32(-np.inf)), np.nextafter(halves, np.float32(np.inf))
    for x in (patterns().view(np.float32), np.concatenate([halves, *near])):
        codes = np.empty(len(x), np.int8)
        round_all(x, codes)
        np.testing.assert_array_equal(codes, expected_int8(x))


@pytest.mark.cuda
def test_on_cuda():
    import _rounding_kernels
    from numba import cuda

    from numba_attn import _device
    from numba_attn.kernels.cuda import launch

    stride = 4001 if _device.is_simulator() else 1
    bits = np.concatenate([patterns()[::stride], ties(np.dtype(ml_dtypes.float8_e5m2))])
    outs = [cuda.device_array(len(bits), dtype) for _, dtype in FLOATS.values()]
    outs.append(cuda.device_array(len(bits), np.int8))
    args = cuda.to_device(bits), cuda.to_device(bits.view(np.float32)), *outs
    launch(_rounding_kernels.round_all, -(-len(bits) // 32), 32, *args)
    for name, out in zip(FLOATS, outs, strict=False):
        check(name, bits, out.copy_to_host())
    np.testing.assert_array_equal(outs[-1].copy_to_host(), expected_int8(bits.view(np.float32)))


STATES = [(0.5, 2.0), (-np.inf, 0.0), (700.0, 1.0), (-700.0, 3.0)]


@pytest.mark.parametrize(("m", "l"), STATES)
@pytest.mark.parametrize("sink", [-np.inf, -5.0, 0.5, 5.0, 1e4])
def test_with_sink_is_one_more_logit(m, l, sink):
    m_new, l_new, factor = recurrence.with_sink(*map(np.float32, (m, l, sink)))
    top = max(m, sink)
    shift = 0 if top == -np.inf else top
    assert m_new == top
    np.testing.assert_allclose(factor, math.exp(m - shift), rtol=1e-6, atol=1e-45)
    expected = l * math.exp(m - shift) + math.exp(sink - shift)
    np.testing.assert_allclose(l_new, expected, rtol=1e-6)


def test_with_sink_of_an_empty_row_is_the_sink_alone():
    assert recurrence.with_sink(*map(np.float32, (-np.inf, 0, 5))) == (5, 1, 0)
    assert recurrence.with_sink(*map(np.float32, (-np.inf, 0, -np.inf))) == (-np.inf, 0, 0)


def test_softcapped():
    s = np.float32([-1e30, -30, -0.1, 0, 1e-3, 25, np.inf])
    capped = [recurrence.softcapped(x, np.float32(50)) for x in s]
    expected = 50 * np.tanh(s.astype(np.float64) / 50)
    np.testing.assert_allclose(capped, expected, rtol=4e-7)
    assert np.isnan(recurrence.softcapped(np.float32(np.nan), np.float32(50)))
