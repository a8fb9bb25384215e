"""What each building block of the CUDA twin must give, by NumPy: on a device and in the simulator.

A misread PTX layout would pass the simulator, so `bench/device_check.py` runs these on a GPU.
CHECKS has the checks by name; each raises AssertionError.
"""

import functools

import _share_kernels
import _warp_kernels
import numpy as np
from _bound import assert_same_bits
from _on_device import dtype_of, read, rows_cuda, to_device, twin

from numba_attn import _arrays, _device, _plan_cuda
from numba_attn._call import Formats
from numba_attn._plan_cuda import Deal, StepVariant
from numba_attn.kernels import warp
from numba_attn.kernels._shares import first_sum, sums_given
from numba_attn.kernels.warp import WARP

DEALS = (  # width 8 as for K, 4 as for V, and a list of weights
    *(_plan_cuda.deal(length, 8) for length in (1, 20, 128, 270)),
    *(_plan_cuda.deal(length, 4) for length in (20, 128, 130)),
    Deal(4, 4, 1, 1),
)
MOST_THREADS = 64 if warp.SIMULATOR else _plan_cuda.MOST_THREADS


def launched(kernel, threads, *arrays):
    """Launch one block; return what the arrays hold afterwards."""
    on_device = [to_device(np.ascontiguousarray(array)) for array in arrays]
    twin().launch(kernel, 1, threads, *on_device)
    return [_arrays.to_host(array) for array in on_device]


def whole(*shape, seed=0, most=100):
    """Draw whole numbers, whose sums are exact in any order."""
    rng = np.random.default_rng(seed)
    return rng.integers(-most, most, shape, endpoint=True).astype(np.float32)


def codes_of(name):
    """Return every code of a format, or of float32 some of each exponent, as its carrier."""
    carrier = _arrays.CARRIERS[name]
    codes = np.arange(1 << 8 * min(carrier.itemsize, 2)).astype(f"u{min(carrier.itemsize, 2)}")
    if name == "float32":
        codes = codes.astype(np.uint32) << 16 | codes[::-1]
    return codes.view(carrier)


def widened(name, codes):
    with np.errstate(invalid="ignore"):  # signalling NaN
        return codes.view(dtype_of(name)).astype(np.float32)


def every_code(name):
    """`warp.LOADERS`: every code is widened exactly."""
    codes = codes_of(name)
    expected = widened(name, codes)
    found = np.zeros(len(codes), np.float32)
    _, found = launched(_warp_kernels.widen_all(name), 64, codes, found)
    nan = np.isnan(expected)
    assert nan.sum() == {"float8_e4m3fn": 2, "float8_e5m2": 6, "int8": 0}.get(name, nan.sum())
    assert np.isnan(found[nan]).all()
    assert_same_bits((found[~nan], expected[~nan]))


def scalars():
    """`load_int32`, `load_float32`, `float_bits`, `divide`: at an address, or by default."""
    integers = to_device(np.array([-(2**31), -1, 0, 7, 2**31 - 1] * 4, np.int32)[::2])
    floats = np.array([0, -0.0, 1.5, -np.inf, np.nan, 1e-45, 3, 4, 5, 6], np.float32)
    backwards = to_device(floats[::-1])
    for arrays in ((integers, backwards), (None, None)):
        places = tuple(rows_cuda().locate(array, 1) for array in arrays)
        dtypes = np.int64, np.float32, np.uint32, np.int64
        results = [to_device(np.zeros(10, dtype)) for dtype in dtypes]
        twin().launch(_warp_kernels.primitives, 1, 32, to_device(floats), places, *results)
        found_integers, found_floats, bits, quotients = map(_arrays.to_host, results)
        expected = (range(10), floats) if arrays[0] is None else (read(integers), floats[::-1])
        assert found_integers.tolist() == list(expected[0])
        assert_same_bits((found_floats, expected[1]), (bits, floats.view(np.uint32)))
        assert quotients.tolist() == [(2**31 - 1 - i) // 7 for i in range(10)]


def blend():
    """x * a + y * b: the second product rounded, then the sum once; in the simulator, about so."""
    rng = np.random.default_rng(0)
    x, a, y, b = (rng.standard_normal(1000).astype(np.float32) for _ in range(4))
    *_, found = launched(_warp_kernels.blend_all, 64, x, a, y, b, np.zeros(1000, np.float32))
    expected = np.float32(x.astype(np.longdouble) * a + y * b)
    if not _device.is_simulator():
        assert_same_bits((found, expected))
    bound = 2.0**-22 * (abs(x * a) + abs(y * b))
    assert (abs(found - expected) <= bound).all()


def row_sums(lanes):
    most = _share_kernels.MOST_SUMS
    values = whole(WARP, most)
    found = np.zeros(most * WARP * most, np.float32)
    _, found = launched(_share_kernels.sum_rows(lanes), WARP, values.ravel(), found)
    expected = np.zeros((most, WARP, most), np.float32)
    totals = values.reshape(-1, lanes, most).sum(axis=1)
    for count in range(1, most + 1):
        padded = np.zeros((len(totals), 2 * WARP), np.float32)
        padded[:, :count] = totals[:, :count]
        given = sums_given(lanes, count)
        for lane in range(WARP):
            first = first_sum(lanes, count, lane % lanes)
            expected[count - 1, lane, :given] = padded[lane // lanes, first : first + given]
    np.testing.assert_array_equal(found.reshape(expected.shape), expected)


def exchanges(lanes, count=3):
    """`lanes_max` and `column_sums`."""
    values = whole(WARP, count, seed=lanes)
    values[5, 0] = -np.inf
    found = np.zeros(WARP * (1 + count), np.float32)
    _, found = launched(_share_kernels.exchange(lanes, count), WARP, values.ravel(), found)
    found = found.reshape(WARP, 1 + count)
    largest = np.repeat(values[:, 0].reshape(-1, lanes).max(axis=1), lanes)
    np.testing.assert_array_equal(found[:, 0], largest)
    columns = values.reshape(-1, lanes, count).sum(axis=0)
    np.testing.assert_array_equal(found[:, 1:], np.tile(columns, (WARP // lanes, 1)))


def products(heads, columns):
    """`dots`, `weigh` and `rescaler`."""
    o, v, weights = whole(heads, columns), whole(columns, seed=1), whole(heads, seed=2)
    numbers = np.concatenate([o.ravel(), v, weights])
    found = np.zeros(heads + 2 * o.size, np.float32)
    _, found = launched(_share_kernels.multiply(heads, columns), 1, numbers, found)
    dots, weighed, rescaled = np.split(found, [heads, heads + o.size])
    np.testing.assert_array_equal(dots, o @ v)
    np.testing.assert_array_equal(weighed.reshape(o.shape), o + weights[:, None] * v)
    np.testing.assert_array_equal(rescaled.reshape(o.shape), o * weights[:, None])


def gather_and_fold(start, stride, count):
    """`gather` and `left_fold`: a negative factor copies the other side; a NaN is a NaN."""
    rng = np.random.default_rng(count)
    numbers = whole(200, most=1000)
    a = rng.choice(np.float32([0, 1, 1, -1]), WARP)
    b = rng.choice(np.float32([0, 1, 2, -1]), WARP)
    if count == WARP:
        a[-1], b[-1] = 1, np.nan
    places = np.array([start, stride, count], np.int64)
    found = np.zeros(2 + WARP, np.float32)
    _, found, *_ = launched(_share_kernels.gather_fold, 1, numbers, found, places, a, b)
    expected = numbers[start + np.minimum(np.arange(WARP), count - 1) * stride]
    np.testing.assert_array_equal(found[2:], expected)
    o = numbers[0]
    for x, by, of in zip(expected, a, b, strict=True):
        o = x if by < 0 else o if of < 0 else o * by + x * of
    np.testing.assert_array_equal(found[0], o)


def scattered(start, stride, count):
    places = np.array([start, stride, count], np.int64)
    numbers, found = whole(WARP), np.full(200, np.nan, np.float32)
    expected = found.copy()
    written = range(min(max(count, 0), WARP))
    expected[[start + i * stride for i in written]] = numbers[: len(written)]
    _, found, _ = launched(_share_kernels.scatter, 1, numbers, found, places)
    np.testing.assert_array_equal(found, expected)


def share_of(rows, deal, lane):
    """Return a lane's share of rows [rows, pitch]: its pieces, 0 for those past the row's end."""
    pieces = np.zeros((len(rows), deal.parts * deal.lanes, deal.width), rows.dtype)
    pieces[:, : deal.pieces] = rows.reshape(len(rows), deal.pieces, deal.width)
    return pieces[:, lane :: deal.lanes].ravel()


def shares_of(name, deal, rows):
    """`loader`, of any numbers that are not NaN."""
    codes = codes_of(name)
    codes = codes[~np.isnan(widened(name, codes))]
    numbers = np.random.default_rng(0).choice(codes, (rows + 1, deal.pitch))
    expected = [share_of(widened(name, numbers[1:]), deal, lane) for lane in range(deal.lanes)]
    found = np.zeros(np.shape(expected), np.float32)
    kernel = _share_kernels.load_shares(name, deal, rows)
    _, found = launched(kernel, WARP, numbers.ravel(), found.ravel())
    assert_same_bits((found, np.ravel(expected)))


def added_shares(deal, rows):
    """`adder`."""
    given = whole(deal.lanes, rows * deal.parts * deal.width)
    before = whole(rows, deal.pitch, seed=1)
    numbers = np.arange(before.size, dtype=np.int32).reshape(before.shape)
    expected = before.copy()
    for lane in range(deal.lanes):
        # A share of places, counted from 1, tells where each number of the share goes.
        places = share_of(numbers + 1, deal, lane)
        expected.ravel()[places[places > 0] - 1] += given[lane][places > 0]
    _, found = launched(_share_kernels.add_shares(deal, rows), WARP, given.ravel(), before.ravel())
    np.testing.assert_array_equal(found.reshape(before.shape), expected)


def copied_rows(name, way):
    """`copier`: by element, 16 bytes at once, or in time for a `waiter`."""
    length = 20 if way == "element" else 48
    formats = Formats(k=name, v=name)
    variant = StepVariant(length, length, way != "element", formats, most_threads=MOST_THREADS)
    variant = variant._replace(asynchronous=way == "in time")
    deal, tile = variant.key, variant.tile
    count = tile + tile // 2 + 1
    rng = np.random.default_rng(0)
    pool = rng.integers(0, 100, (3 * tile, length + 16)).astype(_arrays.CARRIERS[name])
    chosen = rng.permutation(len(pool))[:count]
    found = np.zeros((2 * tile, deal.pitch), pool.dtype)
    expected = np.full_like(found, _share_kernels.SENTINEL)
    expected[:count, :length] = pool[chosen, 16:]
    arrays = [to_device(x) for x in (pool.ravel(), chosen * pool.shape[1] + 16, found.ravel())]
    kernel = _share_kernels.copy_rows(name, deal, variant)
    twin().launch(kernel, 1, variant.threads, *arrays[:2], count, arrays[2])
    assert_same_bits((_arrays.to_host(arrays[2]).reshape(found.shape), expected))


PLACES = (0, 1, 1), (3, 5, 7), (10, 3, 32), (2, 1, 33)
LANES = 1, 2, 4, 8, 16, 32
SIZES = (1, 4), (3, 8), (8, 4)
WAYS = (
    ("element", "at once", "in time") if warp.copies_are_asynchronous() else ("element", "at once")
)


def _named(function, many):
    name = function.__name__.replace("_", " ")
    for args in many:
        words = " ".join("-".join(map(str, x)) if isinstance(x, Deal) else str(x) for x in args)
        yield f"{name} {words}".strip(), functools.partial(function, *args)


CHECKS = dict(
    pair
    for function, many in (
        (every_code, [(name,) for name in _arrays.CARRIERS]),
        (scalars, [()]),
        (blend, [()]),
        (row_sums, [(lanes,) for lanes in LANES]),
        (exchanges, [(lanes,) for lanes in LANES]),
        (products, SIZES),
        (gather_and_fold, PLACES),
        (scattered, [*PLACES, (4, 1, 0), (4, 1, -3)]),
        (shares_of, [(name, deal, 1) for name in _arrays.CARRIERS for deal in DEALS]),
        (shares_of, [("float32", deal, rows) for deal, rows in ((DEALS[1], 3), (DEALS[2], 8))]),
        (added_shares, [(deal, rows) for deal in DEALS[4:] for rows in (1, 3)]),
        (copied_rows, [(name, way) for name in _arrays.CARRIERS for way in WAYS]),
    )
    for pair in _named(function, many)
)
