"""The plan: token counts to work items, in ints."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from numba_attn import _plan

LENS = st.lists(st.integers(0, 3000), max_size=8)


def items_of(lens, split_tokens):
    counts = np.array(lens, np.int32)
    starts = _plan.split_starts(counts, split_tokens)
    return starts, _plan.split_items(starts, counts, split_tokens)


@given(LENS, st.sampled_from([1, 16, 128, 512]))
def test_items_cover_every_token_once_in_order(lens, split_tokens):
    starts, items = items_of(lens, split_tokens)
    assert starts.dtype == items.dtype == np.int32
    assert starts[0] == 0
    assert starts[-1] == len(items)
    for seq, length in enumerate(lens):
        own = items[starts[seq] : starts[seq + 1]]
        assert (own[:, 0] == seq).all()
        tokens = [t for _, begin, end in own.tolist() for t in range(begin, end)]
        assert tokens == list(range(length))


@given(LENS)
def test_splits_start_at_multiples_of_their_length(lens):
    _, items = items_of(lens, 512)
    assert (items[:, 1] % 512 == 0).all()
    assert (items[:, 2] - items[:, 1] <= 512).all()
    assert (items[:, 2] > items[:, 1]).all()


@given(LENS, st.integers(0, 3000))
def test_the_cut_of_a_row_does_not_depend_on_the_others(lens, length):
    starts, items = items_of([*lens, length], 512)
    _, alone = items_of([length], 512)
    np.testing.assert_array_equal(items[starts[-2] :, 1:], alone[:, 1:])


def test_long_rows_stay_in_int32():
    lens = np.array([2**31 - 1, 2**31 - 1], np.int32)
    starts = _plan.split_starts(lens, 2**20)
    items = _plan.split_items(starts, lens, 2**20)
    assert (items[:, 2] > items[:, 1]).all()
    assert items[-1].tolist() == [1, 2**31 - 2**20, 2**31 - 1]


def test_groups_divide_splits():
    assert _plan.SPLIT_TOKENS % _plan.GROUP_TOKENS == 0


def test_the_documented_split_is_512():
    assert _plan.SPLIT_TOKENS == 512


@pytest.mark.parametrize(("a", "b", "quotient"), [(0, 3, 0), (1, 3, 1), (3, 3, 1), (4, 3, 2)])
def test_ceil_div(a, b, quotient):
    assert _plan.ceil_div(a, b) == quotient
