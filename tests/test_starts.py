"""Where attention begins: `seq_starts`, as left padding and evicted blocks need it."""

import numpy as np
import pytest
from _bound import assert_same_bits, check_answer, check_state
from _cases import Tile, absorb, attend, draw, place, step, tiles
from _checks import check_attention

from numba_attn import _device

TINY = _device.is_simulator()
OPTIONS = {
    "plain": {},
    "alibi": {"alibi_slopes": (0.5, 0.01)},
    "window": {"sliding_window": 9},
    "queries": {"queries": 3},
    "sinks": {"sinks": (1.0, 2.0)},
    "scales": {"token_scales": True},
}


@pytest.fixture(params=[(0, 0), (1, 3), (16, 5), (17, 0), (39, 8), (40, 9)], ids=str)
def starts(backend, request):
    return tuple(np.minimum(request.param, backend.size((40, 9), (14, 9))))


@pytest.mark.parametrize("block_size", [4] if TINY else [1, 4, 16])
def test_what_comes_before_is_never_read(backend, starts, block_size):
    """Slots before the start hold NaN, whole blocks before it have ids that lead nowhere."""
    seqs = draw(backend.size((40, 9), (14, 9)), num_kv_heads=1, starts=starts)
    paged = place(seqs, block_size)
    whole = place(seqs, block_size, whole=True)
    answer = attend(backend, seqs, paged)
    check_answer(seqs, answer)
    assert_same_bits(*zip(answer, attend(backend, seqs, whole), strict=True))


@pytest.mark.parametrize("name", OPTIONS)
def test_a_padded_row_has_the_bits_of_the_row_alone(twin, name):
    """Splits count from the start, wherever it is."""
    lens = twin.size((1000, 530, 9), (20, 4))
    starts = twin.size((37, 513, 8), (5, 3))
    padded = draw(lens, num_kv_heads=1, starts=starts, **OPTIONS[name])
    for s, (start, n) in enumerate(zip(starts, lens, strict=True)):
        row = padded.rows(s)
        alone = row.tokens(start, n).but(starts=None)
        a, b = (attend(twin, seqs, place(seqs, 16)) for seqs in (row, alone))
        assert_same_bits(*zip(a, b, strict=True))
    whole = attend(twin, padded, place(padded, 16))
    check_answer(padded, whole)
    assert_same_bits((whole.out[-1:], a.out), (whole.lse[-1:], a.lse))


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("blocks", [1] if TINY else [1, 2, 64])
def test_any_tiles(backend, name, blocks):
    lens, starts = backend.size(((70, 33, 5), (30, 33, 0)), ((14, 5), (9, 1)))
    seqs = draw(lens, num_kv_heads=1, starts=starts, **OPTIONS[name])
    check_attention(backend, seqs, 4, blocks)


def test_tiles_of_whole_splits_from_the_start_have_the_bits_of_one_call(cpu):
    """The first tile ends so many splits after the start."""
    split, start = cpu.split_tokens, 8
    seqs = draw((2 * split + start + 9,), num_kv_heads=1, starts=(start,))
    paged = place(seqs, 8)
    cut = (split + start) // 8
    first, rest = next(tiles(paged, cut)), seqs.lens - 8 * cut
    tail = Tile(paged.block_tables[:, cut:], -(-rest // 8), rest, np.array([8 * cut]))
    tiled, whole = (absorb(cpu, seqs, paged, tiling) for tiling in ([first, tail], None))
    assert_same_bits(*zip(cpu.read(tiled), cpu.read(whole), strict=True))


def test_a_start_at_the_length_is_an_empty_row(backend):
    seqs = draw((9, 9, 0), num_kv_heads=1, starts=(9, 3, 0), sinks=(1.0, 2.0))
    paged = place(seqs, 4)
    out, lse = attend(backend, seqs, paged)
    assert (out[[0, 2]] == 0).all()
    assert lse[[0, 2]].tolist() == [[1.0, 2.0]] * 2
    state = absorb(backend, seqs, paged)
    assert (backend.read(state)[1][[0, 2]] == 0).all()
    check_state(seqs, backend.read(state))


def test_a_tile_before_the_start_leaves_the_state_as_it_is(twin):
    seqs = draw((30,), num_kv_heads=1, starts=(20,))
    paged = place(seqs, 4)
    before, *rest = tiles(paged, 5)
    state = absorb(twin, seqs, paged, rest)
    expected = twin.read(state)
    step(twin, state, seqs, paged, before)
    assert_same_bits(*zip(twin.read(state), expected, strict=True))


@pytest.mark.parametrize("dtype", [np.int64, np.uint8, list])
def test_any_integers(twin, dtype):
    seqs = draw((9, 5), num_kv_heads=1, starts=(3, 0))
    paged = place(seqs, 4)
    starts = [3, 0] if dtype is list else np.array([3, 0], dtype)
    answers = attend(twin, seqs, paged), attend(twin, seqs, paged, seq_starts=starts)
    assert_same_bits(*zip(*answers, strict=True))
