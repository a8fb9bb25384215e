"""Several query tokens per sequence: as many in each, or any number; causal, or all keys."""

import _backends
import numpy as np
import pytest
from _bound import assert_same_bits, check_answer, check_close, normalise
from _cases import Answer, absorb, attend, draw, place, tiles
from _checks import check_attention

from numba_attn import _device

TINY = _device.is_simulator()
OPTIONS = {
    "plain": {},
    "window": {"sliding_window": 5},
    "sinks": {"sinks": (1.0, -1.0)},
    "alibi": {"alibi_slopes": (0.5, 0.01)},
    "scales": {"token_scales": True},
}


def single(seqs, s, i):
    """Make the case of one query alone: its sequence ends with it."""
    one = seqs.rows(s)
    num_queries, tokens = len(one.queries[0]), len(one.keys[0])
    end = max(0, tokens - num_queries + i + 1) if seqs.causal else tokens
    q = one.queries[0][i][None]
    return one.tokens(0, end).but(q=q, query_counts=None)


def answers_of(seqs, answer):
    """Yield (sequence, query, out, lse), query by query."""
    place = [(s, i) for s, queries in enumerate(seqs.queries) for i in range(len(queries))]
    out = answer.out.reshape(len(place), *answer.out.shape[-2:])
    lse = answer.lse.reshape(len(place), -1)
    return [(s, i, out[row], lse[row]) for row, (s, i) in enumerate(place)]


@pytest.mark.parametrize(
    ("name", "queries"),
    [(name, q) for name in OPTIONS for q in (1, 2, 3, 8) if not TINY or name == "plain" or q == 2],
)
def test_q_queries_equal_q_calls_with_growing_lengths(backend, queries, name):
    """Bit for bit on a twin: a query does not see those beside it."""
    lens = backend.size((50, 5, 530), (5,))
    if name == "alibi" and queries > min(lens):
        lens = tuple(max(n, queries) for n in lens)  # alone it would stand elsewhere
    seqs = draw(lens, num_kv_heads=1, gqa=backend.size(2, 1), queries=queries, **OPTIONS[name])
    answer = attend(backend, seqs, place(seqs, 4))
    assert answer.out.shape == seqs.q.shape
    assert answer.lse.shape == seqs.q.shape[:-1]
    check_answer(seqs, answer)
    found = answers_of(seqs, answer)
    for s, i, out, lse in found if not backend.tiny else found[:: max(1, queries - 1)]:
        one = single(seqs, s, i)
        alone = attend(backend, one, place(one, 16))
        assert_same_bits((out[None], alone.out), (lse[None], alone.lse))


def test_one_query_with_an_axis_of_its_own_has_the_bits_of_none(backend):
    seqs = draw(backend.size((70, 0, 530), (9, 0)), num_kv_heads=1)
    paged = place(seqs, 4)
    out, lse = attend(backend, seqs.but(q=seqs.q[:, None]), paged)
    expected = attend(backend, seqs, paged)
    assert_same_bits((out, expected.out[:, None]), (lse, expected.lse[:, None]))


@pytest.mark.parametrize("counts", [(1, 2, 3), (0, 4, 0), (8, 1, 1), (1, 1, 1), (0, 0, 0)])
def test_ragged_queries_equal_a_call_for_each_sequence(twin, counts):
    lens = twin.size((50, 5, 530), (9, 5, 2))
    seqs = draw(lens, num_kv_heads=1, gqa=twin.size(2, 1), queries=counts)
    out, lse = attend(twin, seqs, place(seqs, 4))
    assert out.shape == seqs.q.shape
    assert lse.shape == seqs.q.shape[:-1]
    first = 0
    for s, count in enumerate(counts):
        one = seqs.rows(s)
        alone = one.but(q=one.q[None], query_counts=None)  # [1, Q, Hq, D]
        rows = slice(first, first + count)
        first += count
        if count:
            expected = attend(twin, alone, place(alone, 4))
            assert_same_bits((out[rows], expected.out[0]), (lse[rows], expected.lse[0]))


def test_one_ragged_query_each_is_the_plain_call(backend):
    seqs = draw((13, 0, 9), num_kv_heads=1)
    paged = place(seqs, 4)
    ragged = attend(backend, seqs.but(query_counts=(1, 1, 1)), paged)
    assert_same_bits(*zip(ragged, attend(backend, seqs, paged), strict=True))


@pytest.mark.parametrize("form", [4, (4, 4)], ids=["4-D", "ragged"])
def test_a_query_before_position_0_sees_nothing(backend, form):
    seqs = draw((2, 0), num_kv_heads=1, queries=form)
    paged = place(seqs, 4)
    answer = attend(backend, seqs, paged)
    check_answer(seqs, answer)
    for s, i, out, lse in answers_of(seqs, answer):
        none = s == 1 or i < 2
        assert (lse == -np.inf).all() == none
        assert (out == 0).all() == none


@pytest.mark.parametrize("queries", [2, 8, (3, 0, 1)])
@pytest.mark.parametrize("window", [None, 4])
def test_without_causal_every_query_sees_all_keys(backend, queries, window):
    """As in cross attention; more queries than keys are no matter."""
    lens = backend.size((40, 5, 530), (5, 1, 0))
    sizes = {"num_kv_heads": 1, "gqa": backend.size(2, 1)}
    seqs = draw(lens, queries=queries, causal=False, sliding_window=window, **sizes)
    paged = place(seqs, 4)
    answer = attend(backend, seqs, paged)
    check_answer(seqs, answer)
    if window is None:
        for s, i, out, lse in answers_of(seqs, answer)[:3]:
            one = single(seqs, s, i)
            alone = attend(backend, one, place(one, 4))
            assert_same_bits((out[None], alone.out), (lse[None], alone.lse))


@pytest.mark.parametrize("queries", [3, (3, 1)], ids=["4-D", "ragged"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("blocks", [2] if TINY else [1, 2, 64])
def test_any_tiles(backend, queries, causal, blocks):
    lens, gqa = backend.size((33, 4), (9, 2)), backend.size(2, 1)
    seqs = draw(lens, num_kv_heads=1, gqa=gqa, queries=queries, causal=causal)
    check_attention(backend, seqs, 4, blocks)


def test_causal_is_the_default(backend):
    seqs = draw((9,), num_kv_heads=1, queries=3)
    paged = place(seqs, 4)
    answers = [attend(backend, seqs, paged, **how) for how in ({}, {"causal": True})]
    assert_same_bits(*zip(*answers, strict=True))
    check_answer(seqs, answers[0])


def test_a_state_has_a_row_for_each_query(backend):
    seqs = draw((13, 5), num_kv_heads=1, queries=3)
    ragged = seqs.but(q=seqs.q.reshape(6, 2, 32), query_counts=(3, 3))
    paged = place(seqs, 4)
    states = [absorb(backend, case, paged, tiles(paged, 2)) for case in (seqs, ragged)]
    for state in states:
        assert state.m.shape == state.l.shape == (6, 2)
        assert state.o.shape == (6, 2, 32)
    assert_same_bits(*zip(*map(backend.read, states), strict=True))
    own = backend.module.AttentionState(2, 2, 32, num_queries=6, **backend.place)
    for tile in tiles(paged, 2):
        backend.step_tile(
            own,
            seqs.q,
            *paged[:2],
            *tile[:2],
            tile_token_counts=tile.tile_token_counts,
            tile_starts=tile.tile_starts,
            seq_lens=paged.seq_lens,
        )
    assert_same_bits(*zip(*map(backend.read, (own, states[0])), strict=True))


def test_strides_of_queries_change_no_bit(backend):
    """Queries head-major, or sliced from packed q, k and v."""
    seqs = draw((13, 5), num_kv_heads=1, queries=3)
    paged = place(seqs, 4)
    head_major = np.ascontiguousarray(seqs.q.swapaxes(1, 2)).swapaxes(1, 2)
    packed = np.full((2, 3, 5, 32), np.nan, seqs.q.dtype)
    packed[:, :, 1:3] = seqs.q
    expected = attend(backend, seqs, paged)
    for q in (head_major, packed[:, :, 1:3], seqs.q[:, ::-1][:, ::-1]):
        assert_same_bits(*zip(attend(backend, seqs.but(q=q), paged), expected, strict=True))


def test_out_of_several_queries(backend):
    """Written in place, whatever its strides, and nothing beside it."""
    seqs = draw((13, 0), num_kv_heads=1, queries=3)
    paged = place(seqs, 4)
    expected = attend(backend, seqs, paged)
    room = np.full((2, 5, 4, 40), 7, seqs.q.dtype)
    out = room[:, 1:4, ::2, 3:35]
    returned, lse = attend(backend, seqs, paged, out=out)
    assert returned is out
    assert_same_bits((out.copy(), expected.out), (lse, expected.lse))
    out[:] = 7
    assert (room == 7).all()


@pytest.mark.cuda
def test_twins_agree():
    cpu, cuda = _backends.get("cpu"), _backends.get("cuda")
    seqs = draw((9, 4), num_kv_heads=1, queries=(2, 3), sliding_window=4)
    paged = place(seqs, 4)
    a, b = (Answer(*normalise(twin.read(absorb(twin, seqs, paged)))) for twin in (cpu, cuda))
    check_close(seqs, a, b)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_threads_change_no_bit(cpu, threads, num_threads):
    seqs = draw((1100, 3, 530), queries=(3, 2, 8), sliding_window=600, token_scales=True)
    paged = place(seqs, 16)
    threads(1)
    expected = attend(cpu, seqs, paged)
    check_answer(seqs, expected)
    threads(num_threads)
    assert_same_bits(*zip(attend(cpu, seqs, paged), expected, strict=True))
