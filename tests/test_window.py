"""A sliding window: the last W keys, the query's own included, and nothing read before them."""

import numpy as np
import pytest
from _bound import assert_same_bits, check_answer, check_state
from _cases import Tile, absorb, attend, draw, place, step, tiles
from _checks import check_attention

from numba_attn import _device

TINY = _device.is_simulator()
TOKENS = 20


def one_hot(tokens=TOKENS, **options):
    """Make a case in which q is 0 and the value at position t is the t-th unit vector."""

    def mark(q, keys, values):
        q[:] = 0
        for v in values:
            v[:] = np.eye(len(v), 32)[:, None]

    return draw((tokens,), num_kv_heads=1, **options).map(mark)


def seen(answer):
    """Return for each query the keys that had weight, all the same: bool [Q, tokens]."""
    out = answer.out.astype(np.float64).reshape(-1, 2, 32)
    assert (out[:, :1] == out).all()
    out = out[:, 0, :TOKENS]
    keys = out > 0
    for row, weights in zip(keys, out, strict=True):
        assert (weights[row] == np.float32(1 / max(1, row.sum())).astype(answer.out.dtype)).all()
    np.testing.assert_allclose(answer.lse.reshape(-1, 2)[:, 0], log_of_count(keys), rtol=1e-6)
    return keys


def log_of_count(keys):
    with np.errstate(divide="ignore"):
        return np.log(keys.sum(axis=1))


@pytest.mark.parametrize("window", [1, 2, TOKENS - 1, TOKENS, TOKENS + 1])
def test_exactly_the_last_keys_are_seen(backend, window):
    seqs = one_hot(sliding_window=window)
    (keys,) = seen(attend(backend, seqs, place(seqs, 4)))
    assert np.flatnonzero(keys).tolist() == list(range(max(0, TOKENS - window), TOKENS))


@pytest.mark.parametrize("window", [1, 3, 18, 19, 20, 21])
def test_each_query_sees_its_own_window(backend, window):
    seqs = one_hot(sliding_window=window, queries=3)
    keys = seen(attend(backend, seqs, place(seqs, 4)))
    for i, row in enumerate(keys):
        own = TOKENS - 3 + i
        assert np.flatnonzero(row).tolist() == list(range(max(0, own - window + 1), own + 1))


def test_without_causal_a_window_bounds_the_past_only(backend):
    seqs = one_hot(sliding_window=2, queries=3, causal=False)
    keys = seen(attend(backend, seqs, place(seqs, 4)))
    assert [np.flatnonzero(row).tolist() for row in keys] == [
        [16, 17, 18, 19],
        [17, 18, 19],
        [18, 19],
    ]


@pytest.mark.parametrize(("start", "first"), [(3, 13), (13, 13), (15, 15), (19, 19), (20, 20)])
def test_a_start_and_a_window(backend, start, first):
    seqs = one_hot(sliding_window=7, starts=(start,))
    (keys,) = seen(attend(backend, seqs, place(seqs, 4)))
    assert np.flatnonzero(keys).tolist() == list(range(first, TOKENS))


@pytest.mark.parametrize("window", [1, 7, 600])
@pytest.mark.parametrize("queries", [None, 3, (4, 0, 1)])
def test_what_is_outside_changes_no_bit(twin, window, queries):
    """NaN and inf in the keys before the window, and ids that lead nowhere in the tables."""
    lens = twin.size((700, 5, 530), (20, 5, 1))
    window = min(window, twin.size(600, 11))
    gqa = twin.size(2, 1)
    seqs = draw(lens, gqa=gqa, num_kv_heads=1, sliding_window=window, queries=queries)
    whole, *spoiled = (
        place(seqs, 4, whole=True),
        place(seqs, 4),
        place(seqs, 7, fill=np.inf, ids=(-(2**31), 2**31 - 1)),
    )
    expected = attend(twin, seqs, whole)
    check_answer(seqs, expected)
    for paged in spoiled:
        assert_same_bits(*zip(attend(twin, seqs, paged), expected, strict=True))


@pytest.mark.parametrize("window", [700, 701, 2**31 - 1, 2**40])
def test_a_window_of_the_whole_context_changes_no_bit(twin, window):
    tokens = twin.size(700, 20)
    window = min(window, tokens) if window == 700 else window
    seqs = draw((tokens, 3), num_kv_heads=1)
    paged = place(seqs, 16)
    windowed = attend(twin, seqs, paged, sliding_window=window)
    assert_same_bits(*zip(windowed, attend(twin, seqs, paged), strict=True))


@pytest.mark.parametrize("blocks", [1, 2, 3, 50])
@pytest.mark.parametrize("window", [4, 9] if TINY else [1, 4, 13, 33])
def test_any_tiles(backend, blocks, window):
    seqs = draw(backend.size((90, 33, 5), (14,)), num_kv_heads=1, sliding_window=window)
    check_attention(backend, seqs, 4, blocks)


@pytest.mark.parametrize("full", [False, True], ids=["empty", "filled"])
def test_a_tile_outside_leaves_the_state_as_it_is(twin, full):
    """Whole tiles before the window change no bit, whether they come first or last."""
    seqs = draw((30, 9), num_kv_heads=1, sliding_window=6, queries=2)
    paged = place(seqs, 4)
    before, *rest = tiles(paged, 5)  # tokens 0..19: outside, for sequence 0
    state = absorb(twin, seqs, paged, rest if full else [])
    m, l, o = twin.read(state)
    outside = before._replace(tile_token_counts=np.array([20, 0]))
    step(twin, state, seqs, paged, outside)
    assert_same_bits(*zip(twin.read(state), (m, l, o), strict=True))
    assert (l[:2] > 0).all() == full


def test_a_tile_of_garbage_outside(twin):
    """Neither the table of such a tile nor its blocks are read, though all of it counts."""
    seqs = draw((30,), num_kv_heads=1, sliding_window=6)
    state = absorb(twin, seqs, place(seqs, 4), [])
    garbage = Tile(np.full((1, 3), 2147480000), np.array([3]), np.array([12]), np.array([12]))
    step(twin, state, seqs, place(seqs, 4), garbage)
    assert (twin.read(state)[1] == 0).all()


@pytest.mark.parametrize("blocks_before", [0, 1, 3])
def test_evicted_blocks_need_no_entry(backend, blocks_before):
    """A tile may begin anywhere: what came before it is gone, positions are unchanged."""
    seqs = draw((30, 9), num_kv_heads=1, sliding_window=15)
    paged = place(seqs, 4)
    first = np.minimum(4 * blocks_before, [15, 0])  # keys 15.. and 0.. are seen
    counts = -(-(paged.seq_lens - first) // 4)
    moved = np.stack([np.roll(row, -n // 4) for row, n in zip(paged[2], first, strict=True)])
    tile = Tile(moved, counts, paged.seq_lens - first, first)
    state = absorb(backend, seqs, paged, [tile])
    check_state(seqs, backend.read(state))
