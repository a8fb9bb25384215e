"""The plan of a stream: each attended token in one tile, whole splits, no block for nothing."""

import itertools
import threading

import numpy as np
import pytest

from numba_attn import _plan, _tiles
from numba_attn._call import Tile


def draw_whole(rng):
    """Draw tables, lengths and the options that move what is attended to."""
    num_seqs, block_size = rng.integers(1, 5), int(rng.choice([1, 3, 4, 16]))
    counts = np.minimum(rng.integers(0, 200, num_seqs), rng.choice([3, 60, 200]))
    starts = rng.choice([0, 7, 64]) * rng.integers(0, 2, num_seqs)
    after = rng.choice([0, 5, 70]) * rng.integers(0, 2, num_seqs)  # tokens that are elsewhere
    lens = starts + counts + after
    columns = -(-counts.max() // block_size) + 1
    tables = rng.permutation(num_seqs * columns).reshape(num_seqs, columns)
    for s in range(1, num_seqs):
        shared = rng.integers(0, columns + 1)
        tables[s, :shared] = tables[rng.integers(0, s), :shared]
    firsts = rng.integers(0, lens + 1) if rng.random() < 0.5 else None
    positions = (None if x is None else x.astype(np.int32) for x in (counts, starts, lens, firsts))
    queries = int(rng.integers(1, 4))
    query_starts = None
    if rng.random() < 0.4:
        steps = rng.integers(0, 4, num_seqs)
        query_starts, queries = np.concatenate([[0], np.cumsum(steps)]).astype(np.int32), 0
    whole = Tile(tables.astype(np.int32), *positions, query_starts, queries)
    window = int(rng.choice([0, 0, 1, 5, 40]))
    return whole, window, bool(rng.random() < 0.7), block_size


def draw_plan(seed):
    """Draw all of that, the tokens of a split, and the room of a tile."""
    rng = np.random.default_rng(seed)
    whole, window, causal, block_size = draw_whole(rng)
    split, most = int(rng.choice([8, 16, 17, 64])), int(rng.choice([1, 2, 3, 5, 9, 17, 40, 1000]))
    sizes = {"block_size": block_size, "split_tokens": split, "most_blocks": most}
    return whole, (window, causal), sizes


def tiles_of(whole, mask, sizes):
    tiles = _tiles.Tiles(whole, *mask, **sizes)
    found = list(iter_tiles(tiles))
    assert sum(resident.table_blocks for resident in found) == tiles.table_blocks
    return found


def iter_tiles(tiles):
    return itertools.takewhile(lambda tile: tile is not None, map(tiles.get, itertools.count()))


def attended(tile, mask, starts=None):
    """Return (row, sequence, first position, end) of what a kernel attends to, where any is."""
    ranges = _plan.key_ranges(tile, *mask)
    starts = tile.starts if starts is None else starts
    return [
        (row, seq, int(starts[seq] + begin), int(starts[seq] + end))
        for row, (seq, begin, end, *_) in enumerate(zip(*ranges, strict=True))
        if end > begin
    ]


def blocks_of(whole, seq, begin, end, block_size):
    first = int(whole.starts[seq])
    columns = range((begin - first) // block_size, -(-(end - first) // block_size))
    return {int(whole.tables[seq, column]) for column in columns}


SEEDS = range(400)


def test_every_attended_token_of_a_row_is_in_one_tile_in_order():
    for seed in SEEDS:
        whole, mask, sizes = draw_plan(seed)
        parts = {}
        for resident in tiles_of(whole, mask, sizes):
            for row, seq, begin, end in attended(resident.tile, mask):
                parts.setdefault((row, seq), []).append((begin, end))
        for (row, seq), ranges in parts.items():
            ends = [begin for begin, _ in ranges[1:]] + [ranges[-1][1]]
            assert [end for _, end in ranges] == ends, (seed, row)
            parts[row, seq] = ranges[0][0], ranges[-1][1]
        found = [(*key, *ends) for key, ends in sorted(parts.items())]
        assert found == attended(whole, mask), seed


def test_a_tile_has_the_blocks_that_it_attends_to_and_no_others():
    for seed in SEEDS:
        whole, mask, sizes = draw_plan(seed)
        for resident in tiles_of(whole, mask, sizes):
            ids = resident.ids.tolist()
            assert resident.ids.dtype == np.int64
            assert 0 < len(ids) <= sizes["most_blocks"], seed
            assert ids == sorted(set(ids)), seed
            rows = attended(resident.tile, mask)
            used = (blocks_of(whole, *row[1:], sizes["block_size"]) for row in rows)
            assert set(ids) == set().union(*used), seed


def test_a_table_of_a_tile_leads_to_the_blocks_of_its_tokens():
    for seed in SEEDS:
        whole, mask, sizes = draw_plan(seed)
        size = sizes["block_size"]
        for resident in tiles_of(whole, mask, sizes):
            ids, tile = resident.ids, resident.tile
            for _, seq, begin, end in attended(tile, mask):
                position = np.arange(begin, end)
                place = tile.tables[seq, (position - tile.starts[seq]) // size]
                expected = whole.tables[seq, (position - whole.starts[seq]) // size]
                np.testing.assert_array_equal(ids[place], expected, err_msg=str(seed))
                slots = [(position - x.starts[seq]) % size for x in (tile, whole)]
                np.testing.assert_array_equal(*slots, err_msg=str(seed))


def items_of(tile, mask, split):
    """Return (row, first position, end, query's position) of the items that a kernel is given."""
    items = _plan.split_items(_plan.key_ranges(tile, *mask), split).items
    start = tile.starts[items[:, 1]][:, None]
    return np.hstack([items[:, :1], items[:, [2, 3, 5]] + start]).tolist()


def test_splits_that_have_room_are_those_of_one_call():
    whole_splits = 0
    for seed in SEEDS:
        whole, mask, sizes = draw_plan(seed)
        split, size, most = sizes["split_tokens"], sizes["block_size"], sizes["most_blocks"]
        found = [items_of(one.tile, mask, split) for one in tiles_of(whole, mask, sizes)]
        of_rows = sorted(itertools.chain(*found))
        if (split + size - 2) // size + 1 <= most:  # from any token of a block on
            assert of_rows == sorted(items_of(whole, mask, split)), seed
            whole_splits += len(found) > 1
        else:
            assert all(end - begin <= split for _, begin, end, _ in of_rows), seed
    assert whole_splits > 30


def test_a_split_is_cut_only_where_it_has_no_room():
    """Beside one that is too large, others keep their splits."""
    tables, lens = np.arange(12, dtype=np.int32)[None], np.array([41], np.int32)
    sizes = {"block_size": 4, "split_tokens": 8, "most_blocks": 2}
    whole = Tile(tables, lens, np.zeros(1, np.int32), lens, np.array([6], np.int32))
    found = [tile.ids.tolist() for tile in tiles_of(whole, (0, True), sizes)]
    # Splits begin at tokens 6, 14, ... and lie in three blocks; the last one is in two.
    assert found == [[1, 2], [3], [3, 4], [5], [5, 6], [7], [7, 8], [9], [9, 10]]


@pytest.mark.parametrize(
    ("most", "expected"),
    [(7, [4, 4, 4, 4, 6, 4]), (8, [8, 8, 6, 4]), (13, [12, 10, 4]), (26, [26])],
)
def test_a_tile_is_as_full_as_whole_splits_make_it(most, expected):
    """The splits have 4, 4, 4, 4, 4, 2 and 4 blocks."""
    tables = np.array([range(16), range(16, 32)], np.int32)
    sizes = {"block_size": 4, "split_tokens": 16, "most_blocks": most}
    whole = Tile(tables, np.array([64, 40], np.int32))
    assert [len(tile.ids) for tile in tiles_of(whole, (0, True), sizes)] == expected


def test_a_common_prefix_is_resident_once():
    num_seqs, columns = 30, 20
    tables = np.tile(np.arange(columns, dtype=np.int32), (num_seqs, 1))
    tables[:, -1] = 100 + np.arange(num_seqs)
    lens = np.full(num_seqs, columns * 4, np.int32)
    sizes = {"block_size": 4, "split_tokens": 16, "most_blocks": 8}
    found = tiles_of(Tile(tables, lens), (0, True), sizes)
    ids = np.concatenate([tile.ids for tile in found]).tolist()
    assert found[0].ids.tolist() == list(range(8))
    assert ids[:16] == list(range(16))
    assert sorted(set(ids)) == sorted(set(tables.ravel().tolist()))
    # The last split has three common blocks, which come again where its own ones need more tiles.
    assert len(ids) == 16 + num_seqs + 3 * 6


def test_tiles_are_the_same_in_any_order_of_asking():
    for seed in range(0, 400, 20):
        plan = draw_plan(seed)
        expected = tiles_of(*plan)
        tiles = _tiles.Tiles(plan[0], *plan[1], **plan[2])
        for index in reversed(range(len(expected) + 2)):
            same(tiles.get(index), expected[index] if index < len(expected) else None)


def same(one, other):
    assert (one is None) == (other is None)
    if one is not None:
        for a, b in zip((one.ids, *one.tile), (other.ids, *other.tile), strict=True):
            np.testing.assert_array_equal(a, b)


def test_tiles_of_long_tables_are_not_kept(monkeypatch):
    monkeypatch.setattr(_tiles, "REMEMBERED_BYTES", 250)
    tables, lens = np.arange(10, dtype=np.int32)[None], np.array([20], np.int32)
    sizes = {"block_size": 2, "split_tokens": 4, "most_blocks": 4}
    tiles = _tiles.Tiles(Tile(tables, lens), 0, True, **sizes)
    assert not tiles.reusable
    assert [tile.ids.tolist() for tile in iter_tiles(tiles)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9],
    ]
    assert tiles.get(0) is None
    kept = _tiles.Tiles(Tile(tables, lens // 2), 0, True, **sizes)
    assert kept.reusable
    assert kept.get(0) is kept.get(0) is not None


@pytest.mark.parametrize("remembered", [0, 1 << 24])
def test_threads_share_the_tiles_among_them(monkeypatch, remembered):
    monkeypatch.setattr(_tiles, "REMEMBERED_BYTES", remembered)
    tables, lens = np.arange(500, dtype=np.int32)[None], np.array([500], np.int32)
    sizes = {"block_size": 1, "split_tokens": 1, "most_blocks": 1}
    tiles = _tiles.Tiles(Tile(tables, lens), 0, True, **sizes)
    indices, found = itertools.count(), {}
    gate = threading.Barrier(4)

    def work():
        gate.wait()
        for index in indices:
            if (tile := tiles.get(index)) is None:
                return
            found[index] = tile.ids.tolist()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {i: [i] for i in range(500)}


@pytest.mark.parametrize("lens", [[0, 0], [5, 0]])
def test_nothing_to_attend_to_is_no_tile(lens):
    lens = np.array(lens, np.int32)
    whole = Tile(np.zeros((2, 2), np.int32), lens, np.zeros(2, np.int32), lens, lens)
    sizes = {"block_size": 4, "split_tokens": 8, "most_blocks": 2}
    assert tiles_of(whole, (0, True), sizes) == []


def test_a_window_of_a_long_context_is_all_that_is_planned():
    lens = np.array([1 << 20], np.int32)
    tables = np.arange(1 << 16, dtype=np.int32)[None]
    sizes = {"block_size": 16, "split_tokens": 512, "most_blocks": 1000}
    (tile,) = tiles_of(Tile(tables, lens), (4096, True), sizes)
    assert tile.ids.tolist() == list(range((1 << 16) - 256, 1 << 16))
    assert tile.tile.tables.shape[1] <= 256 + 32  # those before the window, in its first split


@pytest.mark.parametrize("num_seqs", [1, 3, 40])
@pytest.mark.parametrize("most_blocks", [1, 5, 64])
def test_the_memory_of_all_tiles_is_not_underestimated(num_seqs, most_blocks):
    tables = np.arange(num_seqs * 60, dtype=np.int32).reshape(num_seqs, 60)
    lens = np.full(num_seqs, 60 * 4, np.int32)
    sizes = {"block_size": 4, "split_tokens": 32, "most_blocks": most_blocks}
    tiles = _tiles.Tiles(Tile(tables, lens), 0, True, **sizes)
    taken = sum(x.nbytes for one in iter_tiles(tiles) for x in one.tile[:5])
    assert taken <= tiles._bytes(32) <= 8 * taken


def test_a_source_cannot_change_what_it_is_asked_for():
    tables, lens = np.arange(4, dtype=np.int32)[None], np.array([4], np.int32)
    sizes = {"block_size": 1, "split_tokens": 4, "most_blocks": 4}
    ids = _tiles.Tiles(Tile(tables, lens), 0, True, **sizes).get(0).ids
    with pytest.raises(ValueError, match="read-only"):
        ids += 1
