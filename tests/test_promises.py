"""The promises that every implementation keeps: empty rows, unused memory, bits, tiles."""

import _backends
import numpy as np
import pytest
from _bound import assert_same_bits, check_answer, check_state
from _cases import BFLOAT16, Answer, Tile, absorb, attend, draw, place, step, tiles

LENS = (40, 0, 1, 600, 513, 16)
TINY = (9, 0)


def ragged(backend, **sizes):
    return draw(backend.size(LENS, TINY), **sizes)


# 1. Empty rows


def test_a_row_of_count_0_keeps_its_state(twin):
    seqs = draw((9, 9, 9), num_kv_heads=1)
    paged = place(seqs, 4)
    state = absorb(twin, seqs, paged)
    before = twin.read(state)
    blocks, counts, tokens, _ = next(tiles(paged, 3))
    for row_counts, row_tokens in ((counts * [0, 1, 0], tokens * [0, 1, 0]), (counts, tokens * 0)):
        step(twin, state, seqs, paged, Tile(blocks, row_counts, row_tokens))
        after = twin.read(state)
        for row in (0, 2):
            assert_same_bits(*((x[row], y[row]) for x, y in zip(before, after, strict=True)))
        assert (after[1][1] == 2 * before[1][1]).all(), "row 1 saw its tokens twice, once"


def test_an_empty_row_is_written(backend):
    seqs = draw((0, 5))
    out = np.full(seqs.q.shape, 7, BFLOAT16)
    result, lse = backend.paged_attention(seqs.q, *place(seqs, 4), out=out, return_lse=True)
    assert result is out
    assert (out[0] == 0).all()
    assert (lse[0] == -np.inf).all()
    check_answer(seqs, Answer(out, lse))


def test_nothing_but_empty_rows(backend):
    seqs = draw((0, 0, 0))
    out, lse = attend(backend, seqs, place(seqs, 4))
    assert (out == 0).all()
    assert (lse == -np.inf).all()


# 2. Nothing past a length is read


@pytest.mark.parametrize("fill", [np.nan, np.inf, -np.inf, 3e38])
def test_unused_memory_changes_no_bit(twin, fill):
    seqs = ragged(twin)
    for block_size in twin.size((5, 16), (5,)):
        clean = place(seqs, block_size, fill=0, ids=(0,))
        dirty = place(seqs, block_size, fill=fill)
        if not twin.tiny:
            one_call = (attend(twin, seqs, paged) for paged in (clean, dirty))
            assert_same_bits(*zip(*one_call, strict=True))
        a, b = (absorb(twin, seqs, paged, tiles(paged, 2)) for paged in (clean, dirty))
        assert_same_bits(*zip(twin.read(a), twin.read(b), strict=True))


def test_ids_past_the_tokens_of_a_tile_are_never_read(twin):
    seqs = draw((6,), num_kv_heads=1)
    paged = place(seqs, 4)
    blocks = np.append(paged.block_tables[:, :2], [[2147480000, -1]], axis=1)
    state = twin.like(seqs.q, paged.v_pool)
    step(twin, state, seqs, paged, Tile(blocks, np.array([4]), np.array([6])))
    assert_same_bits(*zip(twin.read(state), twin.read(absorb(twin, seqs, paged)), strict=True))


# 3. Bits


def test_run_to_run(twin):
    seqs = ragged(twin)
    paged = place(seqs, 16)
    first = attend(twin, seqs, paged)
    for _ in range(twin.size(5, 1)):
        assert_same_bits(*zip(first, attend(twin, seqs, paged), strict=True))


def test_a_row_alone_and_in_a_batch(twin):
    full = (0, 1, 15, 16, 17, 63, 64, 512, 513, 700, 1100, 5)
    tiny = (0, 1, 3, 4, 5, 2, 6, 3, 2, 1, 7, 5)
    seqs = draw(twin.size(full, tiny), gqa=twin.size(2, 1), num_kv_heads=1)
    batch = attend(twin, seqs, place(seqs, 16))
    check_answer(seqs, batch)
    for row in range(0, 12, twin.size(1, 3)):
        alone = seqs.rows(row)
        answer = attend(twin, alone, place(alone, 16, seed=1))
        assert_same_bits(*((x[row : row + 1], y) for x, y in zip(batch, answer, strict=True)))


def test_where_blocks_lie_and_how_large_they_are(twin):
    seqs = ragged(twin)
    first = absorb(twin, seqs, place(seqs, 16))
    for block_size, seed in ((16, 1), (1, 0), (3, 0), (17, 0), (64, 0), (1000, 0)):
        other = absorb(twin, seqs, place(seqs, block_size, seed=seed))
        assert_same_bits(*zip(twin.read(first), twin.read(other), strict=True))


def check_tiles_of_whole_splits(twin, seqs, tile_tokens, block_size):
    state = twin.AttentionState(*seqs.q.shape)
    for begin in range(0, max(seqs.lens), tile_tokens):
        # A tile starts at a block's start: each is resident in a pool of its own.
        part = seqs.tokens(begin, begin + tile_tokens)
        paged = place(part, block_size, seed=begin)
        (tile,) = tiles(paged, paged.block_tables.shape[1])
        step(twin, state, part, paged, tile)
        so_far = seqs.tokens(0, begin + tile_tokens)
        one_call = absorb(twin, so_far, place(so_far, block_size))
        assert_same_bits(*zip(twin.read(state), twin.read(one_call), strict=True))
    check_state(seqs, twin.read(state))


@pytest.mark.parametrize("block_size", [3, 16, 17, 256])
@pytest.mark.parametrize("splits", [1, 2, 3])
def test_tiles_of_whole_splits_have_the_bits_of_one_call(cpu, splits, block_size):
    tokens = splits * cpu.split_tokens
    seqs = draw((2 * tokens + 217, tokens + 1, 0, tokens), num_kv_heads=1)
    check_tiles_of_whole_splits(cpu, seqs, tokens, block_size)


@pytest.mark.cuda
@pytest.mark.parametrize(("splits", "block_size"), [(1, 17), (2, 16)])
def test_tiles_of_whole_splits_have_the_bits_of_one_call_on_cuda(splits, block_size):
    cuda = _backends.get("cuda")
    tokens = splits * cuda.split_tokens
    seqs = draw((tokens + 5,), gqa=1, num_kv_heads=1)
    check_tiles_of_whole_splits(cuda, seqs, tokens, block_size)


def test_tiles_of_whole_splits_of_one_pool(cpu):
    """512 blocks of 3 tokens are 3 splits: tiles of that many are cut from one table."""
    seqs = draw((2 * 1536 + 700, 1536, 5), num_kv_heads=1)
    paged = place(seqs, 3)
    state = absorb(cpu, seqs, paged, tiles(paged, 512))
    one_call = absorb(cpu, seqs, paged)
    assert_same_bits(*zip(cpu.read(state), cpu.read(one_call), strict=True))


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_contiguous_caches_equal_paged_ones(backend, block_size):
    seqs = ragged(backend)
    capacity = max(seqs.lens) + 3
    shape = (len(seqs.q), capacity, *seqs.keys[0].shape[1:])
    k_cache, v_cache = (np.full(shape, np.nan, BFLOAT16) for _ in "kv")
    for s, n in enumerate(seqs.lens):
        k_cache[s, :n], v_cache[s, :n] = seqs.keys[s], seqs.values[s]
    contiguous = backend.paged_attention(seqs.q, k_cache, v_cache, None, seqs.lens, return_lse=True)
    assert_same_bits(*zip(contiguous, attend(backend, seqs, place(seqs, block_size)), strict=True))


# 4. Tiles of any size and order, within the bound


@pytest.mark.parametrize("blocks", [1, 2, 4, 8, 16])
def test_tiles_of_any_size(backend, blocks):
    seqs = ragged(backend)
    paged = place(seqs, backend.size(16, 4))
    check_state(seqs, backend.read(absorb(backend, seqs, paged, tiles(paged, blocks))))


@pytest.mark.parametrize("order", ["reversed", "shuffled"])
def test_tiles_in_any_order(backend, order):
    seqs = ragged(backend)
    paged = place(seqs, 4)
    cut = list(tiles(paged, 2))
    if order == "reversed":
        cut.reverse()
    else:
        np.random.default_rng(3).shuffle(cut)
    check_state(seqs, backend.read(absorb(backend, seqs, paged, cut)))
