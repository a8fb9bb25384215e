"""Options alone, in the pairs that go wrong, and in random sets: each is right under any tiling.

What is special to an option has a file of its own: test_window, test_starts, test_sinks,
test_logits, test_queries, test_formats.
"""

import ml_dtypes
import numpy as np
import pytest
from _bound import assert_same_bits, check_answer, check_state
from _cases import (
    INT8_SCALE,
    Answer,
    absorb,
    attend,
    draw,
    finish,
    options_of,
    place,
    place_scales,
    tiles,
)
from _checks import check_attention
from hypothesis import given, settings
from hypothesis import strategies as st

from numba_attn import _device, _plan

TINY = _device.is_simulator()
LENS = (9, 2) if TINY else (70, 0, 17, 530)
STARTS = (3, 1) if TINY else (5, 0, 16, 300)
RAGGED = (2, 1) if TINY else (2, 0, 20, 3)

ALONE = {
    "scale": {"scale": 0.3},
    "softcap": {"softcap": 1.5},
    "window": {"sliding_window": 6},
    "alibi": {"alibi_slopes": (0.5, 0.0625)},
    "sinks": {"sinks": (0.5, -2.0)},
    "k_scale": {"k_scale": 0.5},
    "v_scale": {"v_scale": 3.0},
    "head scales": {"k_scale": (0.5, 1.7), "v_scale": (3.0, 0.1)},
    "token scales": {"token_scales": True},
    "starts": {"starts": STARTS},
    "queries": {"queries": 3},
    "ragged": {"queries": RAGGED},
    "not causal": {"queries": 3, "causal": False},
    "fp8": {"dtypes": ("bfloat16", "float8_e4m3fn", "float8_e4m3fn")},
    "int8": {
        "dtypes": ("bfloat16", "int8", "int8"),
        "k_scale": INT8_SCALE,
        "v_scale": INT8_SCALE,
    },
    "float16": {"dtypes": "float16"},
    "value dim": {"head_dim": 40, "v_head_dim": 24, "gqa": 2 if TINY else 16},
}
PAIRS = (
    ("window", "sinks"),
    ("window", "starts"),
    ("window", "queries"),
    ("window", "ragged"),
    ("window", "not causal"),
    ("window", "alibi"),
    ("window", "softcap"),
    ("window", "fp8"),
    ("starts", "queries"),
    ("starts", "alibi"),
    ("starts", "sinks"),
    ("sinks", "queries"),
    ("sinks", "softcap"),
    ("alibi", "queries"),
    ("alibi", "ragged"),
    ("ragged", "starts"),
    ("token scales", "window"),
    ("token scales", "ragged"),
    ("fp8", "head scales"),
    ("float16", "sinks"),
)


@pytest.mark.parametrize("name", ALONE)
def test_alone(backend, name):
    check_attention(backend, draw(LENS, num_kv_heads=backend.size(2, 1), **ALONE[name]), 16, 1)


@pytest.mark.parametrize("pair", PAIRS, ids=" x ".join)
def test_pairs(backend, pair):
    options = ALONE[pair[0]] | ALONE[pair[1]]
    seqs = draw(LENS, num_kv_heads=1, seed=1, **options)
    check_attention(backend, seqs.rows(0) if TINY else seqs, 4, blocks_per_tile=2)


# What shapes compiled code: few, as each is compiled.
COMPILED = (
    {},
    {"softcap": 2.0},
    {"alibi_slopes": (0.3, 0.02)},
    {"token_scales": True},
    {"softcap": 20.0, "alibi_slopes": (0.3, 0.02), "token_scales": True},
    {"dtypes": ("bfloat16", "float8_e4m3fn", "float8_e4m3fn")},
    {
        "dtypes": ("float32", "float8_e5m2", "float16"),
        "head_dim": 20,
        "v_head_dim": 12,
        "gqa": 3 if TINY else 9,
        "alibi_slopes": 2.0 ** -np.arange(1, 10),
    },
    {
        "dtypes": ("float16", "int8", "float8_e4m3fn"),
        "head_dim": 12,
        "v_head_dim": 40,
        "gqa": 5,
        "token_scales": True,
    },
)


@st.composite
def cases(draw_from):
    """Draw a batch, and each option or none; what compiles comes from a short list.

    Logits stay below some 20: float32 rounds larger ones by more than the bound's last term, and
    in few tokens the plain evaluation may be lucky.
    """

    def maybe(strategy):
        return draw_from(st.none() | strategy)

    longest, most = (12, 2) if TINY else (70, 4)
    length = st.integers(0, longest)
    if not TINY:
        length |= st.sampled_from([1, 16, _plan.SPLIT_TOKENS + 1])
    lens = draw_from(st.lists(length, min_size=1, max_size=1 if TINY else 4))
    count = st.integers(0, most)
    scale = st.sampled_from([0.5, 1.3]) | st.tuples(*[st.floats(0.25, 2)] * 3)
    options = {
        "num_kv_heads": draw_from(st.integers(1, 1 if TINY else 3)),
        "queries": maybe(st.integers(1, most) | st.tuples(*[count for _ in lens])),
        "starts": maybe(st.tuples(*(st.integers(0, n) for n in lens))),
        "sliding_window": maybe(st.integers(1, 40) | st.sampled_from([2**31 - 1, 600])),
        "sinks": maybe(st.tuples(*[st.floats(-9, 9)] * 5)),
        "scale": maybe(st.sampled_from([0.05, 0.25])),
        "causal": draw_from(st.booleans()),
    }
    compiled = draw_from(st.sampled_from(COMPILED))
    if "token_scales" not in compiled:
        options |= {"k_scale": maybe(scale), "v_scale": maybe(scale)}
    seed = draw_from(st.integers(0, 1000))
    return draw(lens, seed=seed, **{n: x for n, x in options.items() if x is not None}, **compiled)


@settings(max_examples=7 if TINY else 50)
@given(cases(), st.integers(1, 20), st.integers(1, 8), st.randoms())
def test_any_set_of_options_in_any_tiles(backend, seqs, block_size, blocks, random):
    paged = place(seqs, block_size)
    if not backend.tiny or random.random() < 0.5:
        check_answer(seqs, attend(backend, seqs, paged))
    cut = list(tiles(paged, blocks))
    random.shuffle(cut)
    state = absorb(backend, seqs, paged, cut)
    check_state(seqs, backend.read(state))
    check_answer(seqs, finish(backend, seqs, state))


def rows_of(seqs, answer, s):
    """Return what an answer says of one sequence."""
    if seqs.query_counts is None:
        return answer.out[s], answer.lse[s]
    first = sum(seqs.query_counts[:s])
    rows = slice(first, first + seqs.query_counts[s])
    return answer.out[rows], answer.lse[rows]


@given(cases(), st.integers(1, 40), st.integers(1, 40), st.data())
def test_placement_and_batch_change_no_bit(twin, seqs, block_size, other, data):
    whole = attend(twin, seqs, place(seqs, block_size))
    s = data.draw(st.integers(0, len(seqs.keys) - 1))
    one = seqs.rows(s)
    paged = place(one, other, seed=1, fill=np.inf, ids=(-5, 2**31 - 1))
    alone = attend(twin, one, paged)
    assert_same_bits(*zip(rows_of(seqs, whole, s), rows_of(one, alone, 0), strict=True))


def every_option(**more):
    """Make a case of two sequences in which all is on that compiles nothing, and more."""
    options = {"sliding_window": 5, "starts": (2, 0), "sinks": (1.0, 2.0), "queries": 2}
    return draw((9, 5), num_kv_heads=1, **options, **more)


@pytest.mark.parametrize("ragged", [False, True], ids=["4-D", "ragged"])
def test_contiguous_caches_take_every_option(backend, ragged):
    seqs = every_option(token_scales=True)
    if ragged:
        seqs = seqs.but(q=seqs.q.reshape(4, 2, 32), query_counts=(2, 2))
    paged = place(seqs, 12)  # one block a sequence
    order = paged.block_tables[:, 0]
    caches = [pool[order] for pool in paged[:2]]
    scales = {
        name: place_scales(rows, paged)[order]
        for name, rows in (("k_scale", seqs.key_scales), ("v_scale", seqs.value_scales))
    }
    contiguous = paged._replace(k_pool=caches[0], v_pool=caches[1], block_tables=None)
    options = options_of(seqs, paged) | {"sinks": seqs.sinks, "return_lse": True} | scales
    answer = backend.paged_attention(seqs.q, *contiguous, **options)
    assert_same_bits(*zip(answer, attend(backend, seqs, place(seqs, 4)), strict=True))


NUMBERS = (
    {"k_scale": np.float32(0.5)},
    {"k_scale": np.array(0.5)},
    {"k_scale": [0.5]},
    {"k_scale": np.array([0.5], np.float16)},
    {"v_scale": 2},
    {"v_scale": ml_dtypes.bfloat16(2)},
    {"scale": np.float16(0.25)},
    {"sliding_window": np.int8(5)},
    {"sliding_window": np.uint64(5)},
    {"causal": np.True_},
    {"sinks": [1, 2]},
)


@pytest.mark.parametrize("option", NUMBERS, ids=str)
def test_numbers_of_any_kind(twin, option):
    seqs = every_option(k_scale=0.5, v_scale=2.0, scale=0.25)
    paged = place(seqs, 4)
    answers = attend(twin, seqs, paged), attend(twin, seqs, paged, **option)
    assert_same_bits(*zip(*answers, strict=True))


def test_a_start_in_tiles_needs_no_lengths(backend):
    seqs = draw((20, 5), num_kv_heads=1, starts=(9, 2))
    paged = place(seqs, 4)
    state = backend.like(seqs.q, paged.v_pool)
    for tile in tiles(paged, 2):
        options = {"tile_starts": tile.tile_starts, "seq_starts": seqs.starts}
        step_options = options | {"tile_token_counts": tile.tile_token_counts}
        backend.step_tile(state, seqs.q, *paged[:2], *tile[:2], **step_options)
    expected = absorb(backend, seqs, paged, tiles(paged, 2))
    assert_same_bits(*zip(backend.read(state), backend.read(expected), strict=True))


def test_chosen_tokens_are_a_table_of_blocks_of_one_token(backend):
    """Sparse attention: ids of tokens in a view of the pools, which copies nothing."""
    seqs = draw((20, 9), num_kv_heads=1)
    paged = place(seqs, 4)
    chosen = ([3, 17, 4, 11], [8, 0])
    some = seqs.but(
        keys=tuple(k[ids] for k, ids in zip(seqs.keys, chosen, strict=True)),
        values=tuple(v[ids] for v, ids in zip(seqs.values, chosen, strict=True)),
    )
    pools = [pool.reshape(-1, 1, *pool.shape[2:]) for pool in paged[:2]]
    assert all(np.shares_memory(*pair) for pair in zip(pools, paged[:2], strict=True))
    table = np.full((2, 4), 2147480000, np.int32)
    for s, ids in enumerate(chosen):
        table[s, : len(ids)] = paged.block_tables[s, np.array(ids) // 4] * 4 + np.array(ids) % 4
    answer = Answer(
        *backend.paged_attention(seqs.q, *pools, table, np.array([4, 2]), return_lse=True)
    )
    check_answer(some, answer)
    assert_same_bits(*zip(answer, attend(backend, some, place(some, 3)), strict=True))


@given(cases())
def test_tiles_of_whole_splits_have_the_bits_of_one_call(twin, seqs):
    """Splits count from the first key: from there on, tiles of whole splits change no bit."""
    seqs = seqs.but(starts=None)
    paged = place(seqs, 4)
    blocks = twin.split_tokens // 4
    a, b = (absorb(twin, seqs, paged, cut) for cut in (None, tiles(paged, blocks)))
    assert_same_bits(*zip(twin.read(a), twin.read(b), strict=True))
