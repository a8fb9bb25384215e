"""The edges of the number range: NaN and inf are never hidden, subnormals never flushed."""

import numpy as np
import pytest
from _bound import check_answer, check_state
from _cases import Answer, absorb, attend, draw, place, tiles

TOKENS, TINY = 600, 20
WHERE = ("first", "middle", "last")


@pytest.fixture
def seqs(backend):
    """Two kv heads; column 0 of q is 1 and that of k is 0."""

    def neutral(q, keys, values):
        q[..., 0] = 1
        for k in keys:
            k[..., 0] = 0

    gqa = backend.size(2, 1)
    return draw((backend.size(TOKENS, TINY), 3), gqa=gqa, num_kv_heads=2).map(neutral)


def token(seqs, where):
    return {"first": 0, "middle": len(seqs.keys[0]) // 2, "last": -1}[where]


def num_heads(seqs):
    """Query heads of kv head 0."""
    return seqs.q.shape[1] // 2


def answers(backend, seqs):
    """Give the answer of tiles and, if that's affordable, of one call; checked against dense."""
    paged = place(seqs, 16)
    state = absorb(backend, seqs, paged, tiles(paged, 1))
    check_state(seqs, backend.read(state))
    answer = Answer(*backend.finalize(state, return_lse=True))
    check_answer(seqs, answer)
    if not backend.tiny:
        check_answer(seqs, attend(backend, seqs, paged))
    return answer


def with_logit(seqs, where, value):
    """Give the logit of one token for kv head 1 of sequence 0."""

    def change(q, keys, values):
        keys[0][token(seqs, where), 1, 0] = value

    return seqs.map(change)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_nan_or_inf_logit_makes_its_heads_nan(backend, seqs, where, value):
    out, lse = answers(backend, with_logit(seqs, where, value))
    assert np.isnan(out[0, num_heads(seqs) :]).all()
    assert np.isnan(lse[0, num_heads(seqs) :]).all()
    assert np.isfinite(out[0, : num_heads(seqs)].astype(np.float32)).all(), (
        "the other kv head is as it was"
    )
    assert np.isfinite(out[1].astype(np.float32)).all(), "so is the other sequence"


@pytest.mark.parametrize("where", WHERE)
def test_a_logit_of_minus_inf_has_weight_0(backend, seqs, where):
    out, _ = answers(backend, with_logit(seqs, where, -np.inf))
    assert np.isfinite(out.astype(np.float32)).all()


def test_only_logits_of_minus_inf_are_an_empty_row(backend, seqs):
    out, lse = answers(backend, with_logit(seqs, "first", -np.inf).map(_all_minus_inf))
    assert (out[0, num_heads(seqs) :] == 0).all()
    assert (lse[0, num_heads(seqs) :] == -np.inf).all()
    assert np.isfinite(lse[0, : num_heads(seqs)]).all()


def _all_minus_inf(q, keys, values):
    keys[0][:, 1, 0] = -np.inf


def test_every_logit_nan(backend, seqs):
    def change(q, keys, values):
        q[0] = np.nan

    out, lse = answers(backend, seqs.map(change))
    assert np.isnan(out[0]).all()
    assert np.isnan(lse[0]).all()


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_value_shows_in_its_column(backend, seqs, where, value):
    def change(q, keys, values):
        values[0][token(seqs, where), 0, 5] = value

    out, lse = answers(backend, seqs.map(change))
    np.testing.assert_array_equal(
        out[0, : num_heads(seqs), 5].astype(np.float32), np.float32(value)
    )
    rest = np.delete(out[0].astype(np.float32), 5, axis=-1)
    assert np.isfinite(rest).all()
    assert np.isfinite(lse).all()


def test_inf_against_minus_inf_is_nan(backend, seqs):
    def change(q, keys, values):
        values[0][0, 0, 5], values[0][-1, 0, 5] = np.inf, -np.inf

    out, _ = answers(backend, seqs.map(change))
    assert np.isnan(out[0, : num_heads(seqs), 5]).all()


@pytest.mark.parametrize("exponents", [(-128, 124), (124, -128), (100, -104), (-70, 66)])
def test_tiny_times_huge(backend, exponents):
    """Products are near 1 while q or k is subnormal or large: flushing to 0 shows."""

    def stretch(q, keys, values):
        q *= q.dtype.type(2.0 ** exponents[0])
        for k in keys:
            k *= k.dtype.type(2.0 ** exponents[1])

    lens = backend.size((40, 530), (9,))
    seqs = draw(lens, scale=3.0).map(stretch)
    answers(backend, seqs)


def test_tiny_and_huge_values(backend):
    def stretch(q, keys, values):
        values[0] *= values[0].dtype.type(2.0**100)
        values[1] *= values[1].dtype.type(2.0**-100)

    seqs = draw(backend.size((40, 530), (9, 9)), num_kv_heads=1).map(stretch)
    answers(backend, seqs)
