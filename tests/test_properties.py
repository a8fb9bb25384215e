"""Properties over drawn shapes; sizes that shape compiled code come from a short list."""

import _cases
import numpy as np
from _bound import assert_same_bits, check_answer, check_state
from _cases import Sequences, Tile, absorb, attend, draw, place, tiles
from hypothesis import given
from hypothesis import strategies as st

from numba_attn import _plan

SIZES = ((1, 64), (2, 32), (4, 64), (3, 20))  # G, D
SPLIT = _plan.SPLIT_TOKENS


def cases(max_tokens=70):
    """Draw a ragged batch; now and then a row of more than one split."""
    length = st.integers(0, max_tokens) | st.sampled_from([0, 1, 15, 16, 17, SPLIT, SPLIT + 1])
    return st.builds(
        lambda lens, sizes, num_kv_heads, seed: draw(
            lens, gqa=sizes[0], head_dim=sizes[1], num_kv_heads=num_kv_heads, seed=seed
        ),
        st.lists(length, min_size=1, max_size=4),
        st.sampled_from(SIZES),
        st.integers(1, 3),
        st.integers(0, 1000),
    )


def fit(backend, seqs: Sequences) -> Sequences:
    """Cut a case to what the simulator can afford: one sequence of a few tokens."""
    if not backend.tiny:
        return seqs
    return seqs.rows(0).tokens(0, 17)


block_sizes = st.integers(1, 40) | st.sampled_from([64, 256])


@given(cases(), block_sizes)
def test_one_call_is_within_the_bound(backend, seqs, block_size):
    seqs = fit(backend, seqs)
    check_answer(seqs, attend(backend, seqs, place(seqs, block_size)))


@given(cases(), st.integers(1, 20), st.integers(1, 8), st.randoms())
def test_any_tiles_in_any_order(backend, seqs, block_size, blocks, random):
    seqs = fit(backend, seqs)
    paged = place(seqs, block_size)
    cut = list(tiles(paged, blocks))
    random.shuffle(cut)
    check_state(seqs, backend.read(absorb(backend, seqs, paged, cut)))


@given(cases(), st.integers(1, 20), st.data())
def test_each_row_has_tiles_of_its_own(backend, seqs, block_size, data):
    """Deal blocks to tiles row by row, as a cache whose blocks arrive in any order does."""
    seqs = fit(backend, seqs)
    paged = place(seqs, block_size)
    num_tiles = 3
    columns = paged.block_tables.shape[1]
    owner = np.array(
        data.draw(
            st.lists(
                st.lists(st.integers(0, num_tiles - 1), min_size=columns, max_size=columns),
                min_size=len(seqs.q),
                max_size=len(seqs.q),
            )
        )
    )
    state = backend.like(seqs.q, paged.v_pool)
    for tile in range(num_tiles):
        _cases.step(backend, state, seqs, paged, _tile_of(paged, owner == tile))
    check_state(seqs, backend.read(state))


def _tile_of(paged, chosen) -> Tile:
    """Gather the chosen blocks of each row, a partly filled one last."""
    block_size, columns = paged.k_pool.shape[1], paged.block_tables.shape[1]
    first_token = np.arange(columns) * block_size
    filled = np.clip(paged.seq_lens[:, None] - first_token, 0, block_size) * chosen  # [S, columns]
    order = np.argsort(filled == 0, axis=1, kind="stable")
    return Tile(
        np.take_along_axis(paged.block_tables, order, axis=1),
        (filled > 0).sum(axis=1),
        filled.sum(axis=1),
    )


@given(cases(), block_sizes, block_sizes, st.integers(0, 9))
def test_placement_changes_no_bit(twin, seqs, block_size, other, seed):
    seqs = fit(twin, seqs)
    a, b = place(seqs, block_size), place(seqs, other, seed=seed, fill=np.inf, ids=(-5,))
    assert_same_bits(*zip(attend(twin, seqs, a), attend(twin, seqs, b), strict=True))


@given(cases(), st.permutations(range(4)))
def test_the_batch_changes_no_bit(twin, seqs, order):
    seqs = fit(twin, seqs)
    rows = [row for row in order if row < len(seqs.q)][:2]
    some = seqs.rows(*rows)
    whole, part = (attend(twin, s, place(s, 16)) for s in (seqs, some))
    assert_same_bits(*((x[rows], y) for x, y in zip(whole, part, strict=True)))


@given(cases(), st.integers(0, 80), st.booleans())
def test_parts_merge_to_the_whole(backend, seqs, cut, swap):
    seqs = fit(backend, seqs)
    parts = [seqs.tokens(0, cut), seqs.tokens(cut, 2**31)]
    a, b = (absorb(backend, part, place(part, 8)) for part in (parts[::-1] if swap else parts))
    backend.merge(a, b)
    check_state(seqs, backend.read(a))


@given(cases(), st.integers(-6, 6))
def test_doubling_values_doubles_the_output(twin, seqs, power):
    """A power of two in V passes through bit for bit: nothing but V scales the output."""
    seqs = fit(twin, seqs)
    factor = 2.0**power
    scaled = seqs.map(lambda q, keys, values: [v.__imul__(v.dtype.type(factor)) for v in values])
    a, b = (absorb(twin, s, place(s, 16)) for s in (seqs, scaled))
    (m, l, o), (m2, l2, o2) = twin.read(a), twin.read(b)
    assert_same_bits((m, m2), (l, l2), (o * np.float32(factor), o2))


@given(cases(), st.integers(1, 20), st.integers(0, 30))
def test_tokens_that_come_later_change_nothing_before(twin, seqs, block_size, cut):
    """The state of a prefix is that of the prefix alone: a decode step only adds."""
    seqs = fit(twin, seqs)
    prefix = seqs.tokens(0, cut)
    whole = place(seqs, block_size)._replace(seq_lens=prefix.lens)
    short = place(prefix, block_size)
    assert_same_bits(*zip(attend(twin, prefix, whole), attend(twin, prefix, short), strict=True))
