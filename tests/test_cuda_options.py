"""The options on the CUDA twin: what its kernel does with them that the CPU twin does otherwise."""

import numpy as np
import pytest
from _bound import assert_same_bits
from _on_device import (
    dtype_of,
    places_of,
    read,
    reads_wide,
    rows_cuda,
    step_cuda,
    to_device,
    twin,
)

import numba_attn
from numba_attn import AttentionState, _arrays, _plan
from numba_attn._call import Tile

pytestmark = pytest.mark.cuda


def rng_of(*seed):
    return np.random.default_rng(seed)


def numbers(rng, name, *shape):
    """Draw numbers of a format; int8 are about as large as the others with a scale of 1 / 32."""
    x = rng.standard_normal(shape)
    return np.rint(32 * x).astype(np.int8) if name == "int8" else x.astype(dtype_of(name))


def cache(*, lens, block_size=4, heads=(2, 1), dims=(8, 8), formats=("bfloat16",) * 3, seed=0):
    """Draw q [S, Hq, D] in float32, pools, and tables whose unused entries lead nowhere."""
    rng, (num_q_heads, num_kv_heads) = rng_of(seed), heads
    counts = -(-np.array(lens) // block_size)
    blocks = rng.permutation(counts.sum()).astype(np.int32)
    tables = np.full((len(lens), counts.max() + 1), 2147480000, np.int32)
    for row, count in enumerate(counts):
        tables[row, :count], blocks = blocks[:count], blocks[count:]
    k_pool, v_pool = (
        numbers(rng, name, counts.sum(), block_size, num_kv_heads, dim)
        for name, dim in zip(formats[1:], dims, strict=True)
    )
    q = numbers(rng, formats[0], len(lens), num_q_heads, dims[0])
    return q, k_pool, v_pool, tables, np.array(lens, np.int32)


def both(*args, **options):
    """Attend on either twin; return out and lse of both, as float32."""
    answers = []
    for device in ("cpu", "cuda"):
        out, lse = numba_attn.paged_attention(*args, **options, return_lse=True, device=device)
        answers.append((out.astype(np.float32), lse))
    return answers


def check_twins(*args, **options):
    expected, found = both(*args, **options)
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [0, 1, 7, 1000])
@pytest.mark.parametrize("several", ["one", "three", "ragged"])
def test_rows_find_the_keys_that_the_plan_gives(several, window, causal):
    import _warp_kernels

    rng, num_seqs = rng_of(window, causal), 40
    start, count, rest, first = rng.integers(0, [[9], [40], [20], [60]], (4, num_seqs)).astype("i4")
    starts = None
    if several == "ragged":
        starts = np.r_[0, np.cumsum(rng.integers(0, 4, num_seqs))].astype(np.int32)
    queries = {"one": 1, "three": 3, "ragged": 0}[several]
    for known in (True, False):
        positions = (start, start + count + rest, first) if known else (None, None, None)
        tile = Tile(None, count, *positions, starts, queries)
        expected = np.stack(_plan.key_ranges(tile, window, causal), axis=1)
        lists = [None if x is None else to_device(x) for x in tile[1:6]]
        places = rows_cuda().Lists(*(rows_cuda().locate(x, 1) for x in lists))
        sizes = rows_cuda().Sizes(
            len(expected), 2, 1, 16, num_seqs, queries or 1, window, int(causal)
        )
        found = to_device(np.full(expected.shape, -1, np.int64))
        twin().launch(_warp_kernels.find_rows, len(expected), 1, places, sizes, found)
        assert _arrays.to_host(found).tolist() == expected.tolist()


def test_query_tokens_of_no_sequence_attend_to_nothing():
    """A captured graph pads its batch: rows past the last of `query_start_loc`, on the device."""
    q, *rest = cache(lens=(9, 5))
    padded = np.concatenate([q, q, q])
    starts = np.array([1, 2, 4], np.int32)
    given = map(to_device, (padded, *rest))
    out, lse = numba_attn.paged_attention(
        *given, query_start_loc=to_device(starts), return_lse=True
    )
    out, lse = _arrays.to_host(out), _arrays.to_host(lse)
    used = np.array([False, True, True, True, False, False])
    assert (out[~used] == 0).all()
    assert (lse[~used] == -np.inf).all()
    alone = numba_attn.paged_attention(
        padded[1:4], *rest, query_start_loc=starts - 1, return_lse=True, device="cuda"
    )
    assert_same_bits((out[used], alone[0].view(np.uint16)), (lse[used], alone[1]))


def every_option(num_seqs, shape, num_q_heads, seed=0):
    """Draw every array that is an option, for pools of shape [N, B, Hkv]."""
    rng = rng_of(seed)
    return {
        "alibi_slopes": rng.uniform(0, 0.5, num_q_heads).astype(np.float32),
        "sinks": rng.standard_normal(num_q_heads).astype(np.float32),
        "k_scale": rng.uniform(0.5, 2, shape).astype(np.float32),
        "v_scale": rng.uniform(0.5, 2, shape).astype(np.float32),
        "seq_starts": rng.integers(0, 4, num_seqs).astype(np.int32),
    }


def strided(array):
    """Put an array on the device in every other place, backwards."""
    room = np.repeat(array, 2, axis=-1)
    return to_device(np.ascontiguousarray(room[..., ::-1])[..., ::-2])


def test_arrays_of_options_may_have_any_strides():
    q, k_pool, v_pool, tables, lens = cache(lens=(9, 5), heads=(4, 2))
    options = every_option(2, k_pool.shape[:3], 4) | {
        "query_start_loc": np.array([0, 1, 2], np.int32)
    }
    plain = numba_attn.paged_attention(
        q, k_pool, v_pool, tables, lens, **options, return_lse=True, device="cuda"
    )
    given = map(to_device, (q, k_pool, v_pool, tables))
    found = numba_attn.paged_attention(
        *given, strided(lens), **{k: strided(x) for k, x in options.items()}, return_lse=True
    )
    assert_same_bits(
        *zip(map(_arrays.to_host, found), (plain[0].view("u2"), plain[1]), strict=True)
    )


POOL_FORMATS = [
    ("bfloat16", "float16", "float32"),
    ("float16", "float8_e4m3fn", "float8_e5m2"),
    ("float32", "int8", "bfloat16"),
    ("float32", "float32", "int8"),
    ("bfloat16", "float8_e5m2", "float8_e4m3fn"),
]


@pytest.mark.parametrize("formats", POOL_FORMATS, ids="-".join)
def test_each_pool_has_a_format_of_its_own_and_both_load_paths_agree(formats):
    q, *pools, tables, lens = cache(lens=(18,), dims=(16, 32), formats=formats)
    scales = {
        name: 1 / 32 if pool_format == "int8" else 1.5
        for name, pool_format in zip(("k_scale", "v_scale"), formats[1:], strict=True)
    }
    check_twins(q, *pools, tables, lens, **scales)
    answers = []
    for skip in (0, 1):  # elements past a boundary of 16 bytes
        shifted = []
        for bits in map(_arrays.as_carrier, pools):
            room = np.zeros(bits.size + 16, bits.dtype)
            room[skip : skip + bits.size] = bits.ravel()
            shifted.append(to_device(room)[skip : skip + bits.size].reshape(*bits.shape))
        assert reads_wide(*shifted) == (skip == 0)
        shifted = [bits.view(pool.dtype) for bits, pool in zip(shifted, pools, strict=True)]
        given = (to_device(q), *shifted, to_device(tables), to_device(lens))
        answer = numba_attn.paged_attention(*given, **scales, return_lse=True)
        answers.append([_arrays.to_host(x) for x in answer])
    assert_same_bits(*zip(*answers, strict=True))


@pytest.mark.parametrize("which", [("k_scale",), ("v_scale",), ("k_scale", "v_scale")])
def test_scales_by_token_beside_scales_by_head(which):
    formats = "float32", "float8_e4m3fn", "float8_e5m2"
    args = cache(lens=(17, 0, 2), heads=(2, 2), formats=formats)
    by_token = every_option(3, args[1].shape[:3], 2)
    by_head = np.array([0.5, 2], np.float32)
    for other in ({}, {"k_scale": by_head, "v_scale": by_head}):
        check_twins(*args, **other | {name: by_token[name] for name in which})


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32"])
def test_every_option_at_once(name):
    formats = name, "int8", "float16"
    args = cache(lens=(19, 5), heads=(4, 2), dims=(20, 12), formats=formats)
    options = every_option(2, args[1].shape[:3], 4)
    options["k_scale"] /= 32
    expected, found = both(*args, **options, softcap=5.0, sliding_window=17)
    ulp = {"bfloat16": 2**-8, "float16": 2**-11, "float32": 0}[name]
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5 + ulp, atol=1e-5)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-5)


def test_a_latent_cache_is_keys_and_values_at_once():
    q, k_pool, _, tables, lens = cache(
        lens=(19,), heads=(2, 1), dims=(576, 1), formats=("float32", "bfloat16", "bfloat16")
    )
    v_pool = k_pool[..., :512]
    assert np.shares_memory(k_pool, v_pool)
    check_twins(q, k_pool, v_pool, tables, lens, scale=192**-0.5)


def test_queries_and_results_of_several_tokens_may_have_any_strides():
    q, *rest = cache(lens=(9, 2), heads=(4, 2))
    rng = rng_of(1)
    several = numbers(rng, "bfloat16", 2, 3, 4, 8)  # [S, Q, Hq, D]
    expected = numba_attn.paged_attention(several, *rest, return_lse=True, device="cuda")
    packed = np.zeros((3, 2, 6, 24), several.dtype)
    packed[::-1, ::-1, 1:5, 8:16] = several.transpose(1, 0, 2, 3)
    view = packed[::-1, ::-1, 1:5, 8:16].transpose(1, 0, 2, 3)
    out = to_device(np.full((2, 6, 8, 20), 7, np.uint16)[::-1, ::-2, ::-2, 4:12])
    given = (to_device(view), *map(to_device, rest))
    result, lse = numba_attn.paged_attention(*given, out=out, return_lse=True)
    assert result is out
    assert_same_bits((read(out), expected[0].view("u2")), (_arrays.to_host(lse), expected[1]))
    between = np.ones(_arrays.flatten(out).memory.size, bool)
    between[places_of(out)] = False
    assert (_arrays.to_host(_arrays.flatten(out).memory)[between] == 7).all()


def test_tiles_of_whole_splits_give_the_bits_of_one_call():
    split = twin().SPLIT
    q, k_pool, v_pool, tables, lens = cache(lens=(2 * split + 9,), block_size=1, heads=(1, 1))
    first, window = 3, split + 40
    expected = numba_attn.paged_attention(
        q,
        k_pool,
        v_pool,
        tables,
        lens,
        seq_starts=[first],
        sliding_window=window,
        return_lse=True,
        device="cuda",
    )
    state = AttentionState(1, 1, 8, device="cuda")
    for begin, end in ((0, first + split), (first + split, lens[0])):
        numba_attn.step_tile(
            state,
            q,
            k_pool,
            v_pool,
            tables[:, begin:end],
            [end - begin],
            tile_starts=[begin],
            seq_lens=lens,
            seq_starts=[first],
            sliding_window=window,
        )
    found = numba_attn.finalize(state, return_lse=True)
    assert_same_bits(
        *zip(map(_arrays.to_host, found), (expected[0].view("u2"), expected[1]), strict=True)
    )


def test_what_is_outside_the_window_is_never_looked_up():
    q, k_pool, v_pool, tables, lens = cache(lens=(40, 23), block_size=4)
    options = {"sliding_window": 6, "return_lse": True, "device": "cuda"}
    expected = numba_attn.paged_attention(q, k_pool, v_pool, tables, lens, **options)
    kept = np.unique([tables[s, t // 4] for s, n in enumerate(lens) for t in range(n - 6, n)])
    others = np.setdiff1d(np.arange(len(k_pool)), kept)
    k_pool[others], v_pool[others] = np.nan, np.nan
    garbage = np.where(np.isin(tables, kept), tables, -(2**31)).astype(np.int32)
    found = numba_attn.paged_attention(
        *map(to_device, (q, k_pool, v_pool, garbage, lens)), sliding_window=6, return_lse=True
    )
    assert_same_bits(
        *zip(map(_arrays.to_host, found), (expected[0].view("u2"), expected[1]), strict=True)
    )


def test_options_of_run_time_compile_nothing():
    step_cuda().simple.cache_clear()
    args = cache(lens=(9, 3), heads=(2, 1))
    numba_attn.paged_attention(*args, device="cuda")
    for options in (
        {"sliding_window": 3},
        {"causal": False},
        {"seq_starts": [1, 2]},
        {"sinks": [0.5, 1]},
        {"k_scale": 2.0, "v_scale": [0.5]},
        {"query_start_loc": [0, 0, 2]},
        {"scale": 0.1},
    ):
        numba_attn.paged_attention(*args, **options, device="cuda")
    assert step_cuda().simple.cache_info().misses == 1
    numba_attn.paged_attention(*args, softcap=3.0, device="cuda")
    assert step_cuda().simple.cache_info().misses == 2


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_sink_counts_once_in_every_format(dtype):
    rng, sinks = rng_of(2), np.array([5, -np.inf], np.float32)
    m, l, o = (
        rng.standard_normal((2, 2)),
        rng.uniform(1, 2, (2, 2)),
        rng.standard_normal((2, 2, 40)),
    )
    m[1], l[1] = -np.inf, 0
    flat = np.concatenate([part.ravel() for part in (m, l, o)], dtype=np.float32)
    answers = []
    for device in ("cpu", "cuda"):
        state = AttentionState(2, 2, 40, device=device)
        _arrays.overwrite(state.buffer, flat)
        given = sinks if device == "cpu" else to_device(sinks)
        out, lse = numba_attn.finalize(state, sinks=given, dtype=dtype, return_lse=True)
        answers.append((_arrays.to_host(out).view(dtype_of(dtype)), _arrays.to_host(lse)))
        assert_same_bits((_arrays.to_host(state.buffer), flat))
    (expected, expected_lse), (found, lse) = answers
    rtol = {"bfloat16": 2**-7, "float16": 2**-10, "float32": 1e-6}[dtype]
    np.testing.assert_allclose(found.astype("f4"), expected.astype("f4"), rtol=rtol)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-6)
    assert lse[1].tolist() == [5, -np.inf]
    assert (found[1] == 0).all()
