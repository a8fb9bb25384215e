"""The plan: token counts to work items, in ints."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from numba_attn import _plan
from numba_attn._call import Tile

LENS = st.lists(st.integers(0, 3000), max_size=8)


def cut(lens, split_tokens=512, **positions):
    tile = Tile(None, np.array(lens, np.int32), **positions)
    return _plan.split_items(_plan.key_ranges(tile), split_tokens)


@given(LENS, st.sampled_from([1, 16, 128, 512]))
def test_items_cover_every_token_once_in_order(lens, split_tokens):
    starts, items, tokens = cut(lens, split_tokens)
    assert starts.dtype == items.dtype == np.int32
    assert starts[0] == 0
    assert starts[-1] == len(items)
    assert tokens == sum(lens)
    for seq, length in enumerate(lens):
        own = items[starts[seq] : starts[seq + 1]]
        assert (own[:, :2] == seq).all()
        assert own[:, 4].tolist() == list(range(starts[seq], starts[seq + 1]))
        assert (own[:, 5] == length - 1).all()
        covered = [t for begin, end in own[:, 2:4].tolist() for t in range(begin, end)]
        assert covered == list(range(length))


@given(LENS)
def test_splits_start_at_multiples_of_their_length(lens):
    _, items, _ = cut(lens)
    assert (items[:, 2] % 512 == 0).all()
    assert (items[:, 3] - items[:, 2] <= 512).all()
    assert (items[:, 3] > items[:, 2]).all()


@given(LENS, st.integers(0, 3000))
def test_the_cut_of_a_row_does_not_depend_on_the_others(lens, length):
    starts, items, _ = cut([*lens, length])
    alone = cut([length]).items
    np.testing.assert_array_equal(items[starts[-2] :, 2:4], alone[:, 2:4])


def test_long_rows_stay_in_int32():
    lens = np.array([2**31 - 1, 2**31 - 1], np.int32)
    items = cut(lens, 2**20).items
    assert (items[:, 3] > items[:, 2]).all()
    assert items[-1, :4].tolist() == [1, 1, 2**31 - 2**20, 2**31 - 1]


def dense_mask(tile, window, causal):
    """Say for each row and token whether it is attended to, one by one."""
    rows, width = [], int(max(tile.token_counts, default=0))
    for s, tokens in enumerate(tile.token_counts.tolist()):
        start = 0 if tile.starts is None else int(tile.starts[s])
        length = start + tokens if tile.seq_lens is None else int(tile.seq_lens[s])
        first = 0 if tile.seq_starts is None else int(tile.seq_starts[s])
        queries = tile.num_queries
        if tile.query_starts is not None:
            queries = int(tile.query_starts[s + 1] - tile.query_starts[s])
        for i in range(queries):
            query = length - queries + i
            row = np.zeros(width, bool)
            for t in range(tokens):
                key = start + t
                seen = first <= key < length and (key <= query or not causal)
                row[t] = seen and (not window or key > query - window)
            rows.append((s, row, query - start))
    return rows


@given(st.data())
def test_ranges_are_what_a_mask_says(data):
    draw = data.draw
    size = draw(st.integers(1, 4))

    def ints(most):
        return np.array([draw(st.integers(0, most)) for _ in range(size)], np.int32)

    tokens, starts = ints(40), ints(30)
    lens = starts + tokens + ints(20)
    queries = ints(4)
    ragged = draw(st.booleans())
    tile = Tile(
        None,
        tokens,
        starts=draw(st.sampled_from([None, starts])),
        seq_lens=lens,
        seq_starts=draw(st.sampled_from([None, np.minimum(ints(60), lens)])),
        query_starts=np.append(0, np.cumsum(queries)).astype(np.int32) if ragged else None,
        num_queries=0 if ragged else draw(st.integers(1, 4)),
    )
    window, causal = draw(st.sampled_from([0, 1, 2, 7, 100])), draw(st.booleans())
    ranges = _plan.key_ranges(tile, window, causal)
    rows = dense_mask(tile, window, causal)
    assert len(ranges.seq) == len(rows)
    for row, (seq, mask, query) in enumerate(rows):
        begin, end = ranges.begin[row], ranges.end[row]
        assert ranges.seq[row] == seq
        assert ranges.query[row] == query
        assert np.flatnonzero(mask).tolist() == list(range(begin, end))
    first, last = _plan.used_tokens(_plan.key_ranges(tile, window, causal), len(tile.token_counts))
    for s in range(size):
        used = np.flatnonzero(np.any([m for q, m, _ in rows if q == s] or [[False]], axis=0))
        assert not len(used) or (first[s], last[s]) == (used[0], used[-1] + 1)
    _, items, tokens = _plan.split_items(ranges, 16)
    covered = [(r, t) for r, _, b, e, _, _ in items.tolist() for t in range(b, e)]
    expected = [(r, t) for r, (_, mask, _) in enumerate(rows) for t in np.flatnonzero(mask)]
    assert sorted(covered) == expected
    assert tokens == len(covered)


def test_splits_count_from_the_first_key_and_a_window_only_clips_them():
    positions = {"seq_starts": np.array([100], np.int32)}
    items = cut([1300], **positions).items
    assert items[:, 2:4].tolist() == [[100, 612], [612, 1124], [1124, 1300]]
    tile = Tile(None, np.array([1300], np.int32), **positions)
    items = _plan.cut(tile, 700).items
    assert items[:, 2:4].tolist() == [[600, 612], [612, 1124], [1124, 1300]]


@given(LENS, st.integers(1, 3), st.integers(1, 20))
def test_batches_are_the_work_in_pieces(lens, queries, most):
    whole = cut(lens, num_queries=queries)
    done, rows = [], []
    for first, end, work in _plan.batches(whole, most):
        assert len(work.items) <= most or end == first + 1
        assert work.tokens == (work.items[:, 3] - work.items[:, 2]).sum()
        assert work.starts[-1] == len(work.items)
        back = work.items.copy()
        back[:, 4] += whole.starts[first]
        done += back.tolist()
        rows += range(first, end)
    assert sorted(done) == sorted(whole.items.tolist())
    assert rows == sorted(set(rows))


def test_items_of_one_sequence_and_split_come_together():
    items = cut([600, 520], num_queries=2).items
    assert items[:, :3].tolist() == [
        *([0, 0, 0], [1, 0, 0], [0, 0, 512], [1, 0, 512]),
        *([2, 1, 0], [3, 1, 0], [2, 1, 512], [3, 1, 512]),
    ]
    assert items[:, 4].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_a_cut_is_remembered_by_what_shapes_it():
    lens = np.array([5, 9], np.int32)
    one, same = (_plan.cut(Tile(None, lens.copy())) for _ in range(2))
    assert one is same
    others = [
        _plan.cut(Tile(None, lens), 3),
        _plan.cut(Tile(None, lens, num_queries=2)),
        _plan.cut(Tile(None, lens, num_queries=2), causal=False),
        _plan.cut(Tile(None, lens, starts=lens)),
        _plan.cut(Tile(None, lens, seq_lens=lens + 1)),
        _plan.cut(Tile(None, lens, seq_starts=lens)),
    ]
    assert len({id(x) for x in (one, *others)}) == 7
    with pytest.raises(ValueError, match="read-only"):
        one.items[0] = 0


def test_groups_divide_splits():
    assert _plan.SPLIT_TOKENS % _plan.GROUP_TOKENS == 0


def test_the_documented_split_is_512():
    assert _plan.SPLIT_TOKENS == 512


@pytest.mark.parametrize(("a", "b", "quotient"), [(0, 3, 0), (1, 3, 1), (3, 3, 1), (4, 3, 2)])
def test_ceil_div(a, b, quotient):
    assert _plan.ceil_div(a, b) == quotient
