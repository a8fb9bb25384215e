"""What shapes a logit after scaling: softcap, then ALiBi, then the mask."""

import numpy as np
import pytest
from _bound import check_answer, check_state
from _cases import absorb, attend, draw, place, tiles
from _checks import check_attention


@pytest.fixture
def lens(backend):
    return backend.size((70, 0, 530), (9, 0))


@pytest.mark.parametrize("cap", [0.01, 1.0, 50.0, 1e3, 1e5])
def test_softcap(backend, lens, cap):
    """From one that flattens all logits to one that is out of reach."""
    check_attention(backend, draw(lens, num_kv_heads=1, softcap=cap), 16)


@pytest.mark.parametrize("exponent", [-40, -8, 4, 8, 40])
def test_softcap_of_tiny_and_huge_logits(backend, lens, exponent):
    def stretch(q, keys, values):
        q *= q.dtype.type(2.0**exponent)

    check_attention(backend, draw(lens, num_kv_heads=1, softcap=30.0).map(stretch), 16)


def test_softcap_keeps_logits_apart_from_1e_30_to_1e30(backend):
    """The lse of one token is its logit, within a few ulp: small ones are not rounded away."""
    exponents = np.arange(-30, 31, backend.size(1, 12))

    def spread(q, keys, values):
        q[:] = 0
        for row, (exponent, key) in enumerate(zip(exponents, keys, strict=True)):
            q[row, :, 0], key[..., 0] = (1, -1), 10.0**exponent

    seqs = draw((1,) * len(exponents), num_kv_heads=1, softcap=50.0, scale=1.0).map(spread)
    _, lse = attend(backend, seqs, place(seqs, 1))
    logit = np.stack([k[0, 0, 0] for k in seqs.keys]).astype(np.float64)
    expected = 50 * np.tanh(logit / 50)
    np.testing.assert_allclose(lse[:, 0], expected, rtol=1e-6)
    np.testing.assert_array_equal(lse[:, 1], -lse[:, 0])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_softcap_of_logits_that_are_not_finite(backend, value):
    """NaN stays NaN; an infinite logit is capped as any other."""

    def spoil(q, keys, values):
        q[..., 0] = 1
        for k in keys:
            k[..., 0] = 0
        keys[0][3, :, 0] = value

    lens = backend.size((20, 20), (5, 5))
    seqs = draw(lens, num_kv_heads=1, softcap=4.0).map(spoil)
    paged = place(seqs, 4)
    answer = attend(backend, seqs, paged)
    check_answer(seqs, answer)
    assert np.isnan(answer.lse[0]).all() == np.isnan(value)
    state = absorb(backend, seqs, paged, tiles(paged, 1))
    check_state(seqs, backend.read(state))


def test_masked_logits_are_not_capped(backend):
    """A cap of 1 would give masked keys a weight: -1, not -inf."""
    seqs = draw((20, 3), num_kv_heads=1, softcap=1.0, sliding_window=4, queries=2)
    check_attention(backend, seqs, 4, 1)


def test_alibi_halves_weights_from_key_to_key(backend):
    """Slope log 2 and logits of 0: weights 1, 1/2, 1/4, back from the query's own key."""

    def mark(q, keys, values):
        q[:] = 0
        values[0][:] = np.eye(9, 32)[:, None]

    slopes = np.log([2.0, 4.0]).astype(np.float32)
    seqs = draw((9,), num_kv_heads=1, alibi_slopes=slopes, dtypes="float16").map(mark)
    out, lse = attend(backend, seqs, place(seqs, 4))
    for h, ratio in enumerate((0.5, 0.25)):
        weights = ratio ** np.arange(8, -1, -1.0)
        expected = weights / weights.sum()
        np.testing.assert_allclose(out[0, h, :9].astype(np.float64), expected, rtol=1e-3)
        np.testing.assert_allclose(lse[0, h], np.log(weights.sum()), rtol=1e-6)


@pytest.mark.parametrize("slopes", [(0.5, 2.0**-8), (0.0, 1.0), (-0.25, 3.0), (0.0, 0.0)])
def test_alibi(backend, lens, slopes):
    check_attention(backend, draw(lens, num_kv_heads=1, alibi_slopes=slopes), 16)


def test_alibi_of_heads_in_every_place(backend):
    """As many slopes as heads, all different."""
    heads = backend.size((9, 3), (3, 1))
    dtypes = ("float32", "float8_e5m2", "float16")
    sizes = {"gqa": heads[0], "num_kv_heads": heads[1], "head_dim": 20, "v_head_dim": 12}
    slopes = 2.0 ** -np.linspace(0.5, 8, heads[0] * heads[1])
    lens = backend.size((70, 17), (9,))
    check_attention(backend, draw(lens, alibi_slopes=slopes, dtypes=dtypes, **sizes), 4)


def test_alibi_far_from_the_query(backend):
    """Positions near 2^24 and slopes that cancel what q . k gives."""
    seqs = draw((backend.size(530, 9),), num_kv_heads=1, alibi_slopes=(1e-3, 10.0))
    check_attention(backend, seqs, 16)


def test_alibi_does_not_depend_on_where_a_sequence_begins(twin):
    """Only the distance counts: tiles at position 2^30 have the bits of tiles at 0."""
    seqs = draw((9,), num_kv_heads=1, alibi_slopes=(0.5, 0.01), sliding_window=5, queries=2)
    paged = place(seqs, 4)
    states = []
    for first in (0, 2**30, 2**31 - 10):
        state = twin.like(seqs.q, paged.v_pool)
        for tile in tiles(paged, 2):
            twin.step_tile(
                state,
                seqs.q,
                *paged[:2],
                *tile[:2],
                tile_token_counts=tile.tile_token_counts,
                tile_starts=tile.tile_starts + np.int32(first),
                seq_lens=paged.seq_lens + np.int32(first),
                alibi_slopes=seqs.alibi_slopes,
                sliding_window=5,
            )
        states.append(twin.read(state))
    for state in states[1:]:
        for x, y in zip(state, states[0], strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("scale", [1e-6, 0.05, 1.0, 30.0])
def test_scale(backend, lens, scale):
    check_attention(backend, draw(lens, num_kv_heads=1, scale=scale), 16)
