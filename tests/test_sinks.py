"""Sinks: one more logit per head, whose value is 0, counted once however the work is cut."""

import numpy as np
import pytest
from _bound import assert_same_bits, check_answer, check_state
from _cases import Answer, absorb, attend, draw, finish, place, tiles
from _checks import check_attention

from numba_attn import _device

TINY = _device.is_simulator()
SPLITS = (1, 2, 7)
SIZES = {"gqa": 2, "head_dim": 32}
TINY_SIZES = {"gqa": 1, "head_dim": 8}


@pytest.fixture
def split(backend, monkeypatch):
    """Tokens of a split, as few as the simulator can afford: there the kernel reads a global."""
    if backend.tiny:
        monkeypatch.setattr(_device.backend("cuda"), "SPLIT", 16)
    return 512 if backend.name == "reference" else backend.split_tokens


@pytest.mark.parametrize("splits", SPLITS)
def test_a_sink_counts_once_for_any_number_of_splits(backend, split, splits):
    """Logits are 0, so the answer is known: n values of 1 and a sink of e^5."""
    tokens = splits * split

    def flat(q, keys, values):
        q[:], values[0][:] = 0, 1

    sizes = backend.size(SIZES, TINY_SIZES)
    seqs = draw((tokens,), num_kv_heads=1, sinks=5.0, dtypes="float16", **sizes).map(flat)
    paged = place(seqs, 16)
    answer = attend(backend, seqs, paged)
    check_answer(seqs, answer)
    expected = tokens / (tokens + np.exp(5.0))
    np.testing.assert_allclose(answer.out.astype(np.float64), expected, rtol=2**-10)
    np.testing.assert_allclose(answer.lse, np.log(tokens + np.exp(5.0)), rtol=1e-6)


@pytest.mark.parametrize("blocks", [1, 64] if TINY else [1, 2, 3, 64])
@pytest.mark.parametrize("sinks", [(5.0, -5.0), (-np.inf, 80.0), (0.0, -200.0)])
def test_any_tiles(backend, blocks, sinks):
    seqs = draw(backend.size((70, 0, 21), (9, 0)), num_kv_heads=1, sinks=sinks)
    check_attention(backend, seqs, 4, blocks)


def test_partials_merge_and_the_sink_is_counted_once(backend):
    seqs = draw((40, 17), num_kv_heads=1, sinks=(5.0, 1.0))
    parts = [seqs.tokens(0, 13), seqs.tokens(13, 25), seqs.tokens(25, 40)]
    state, *rest = (absorb(backend, part, place(part, 4)) for part in parts)
    for part in rest:
        backend.merge(state, part)
    check_answer(seqs, finish(backend, seqs, state))
    check_state(seqs, backend.read(state))  # it has no sink


def test_an_empty_row_is_0_and_its_lse_the_sink(backend):
    seqs = draw((0, 3), num_kv_heads=1, sinks=(5.0, -np.inf))
    paged = place(seqs, 4)
    state = absorb(backend, seqs, paged)
    for out, lse in (attend(backend, seqs, paged), finish(backend, seqs, state)):
        assert (out[0] == 0).all()
        assert lse[0].tolist() == [5.0, -np.inf]
    assert (backend.lse(state)[0] == -np.inf).all()


def test_a_row_of_logits_of_minus_inf_is_as_an_empty_one(backend):
    def never(q, keys, values):
        q[..., 0], keys[0][..., 0] = 1, -np.inf

    seqs = draw((3,), num_kv_heads=1, sinks=(5.0, 0.0)).map(never)
    out, lse = attend(backend, seqs, place(seqs, 4))
    assert (out == 0).all()
    assert lse.tolist() == [[5.0, 0.0]]


def test_nan_stays_nan(backend):
    def spoil(q, keys, values):
        keys[0][1] = np.nan

    seqs = draw((3, 3), num_kv_heads=1, sinks=(5.0, 0.0)).map(spoil)
    out, lse = attend(backend, seqs, place(seqs, 4))
    assert np.isnan(out[0].astype(np.float32)).all()
    assert np.isnan(lse[0]).all()
    assert np.isfinite(out[1].astype(np.float32)).all()


def test_finalize_leaves_the_state_as_it_is_and_the_lse_without_a_sink(twin):
    seqs = draw((9, 0), num_kv_heads=1, sinks=(5.0, -1.0))
    state = absorb(twin, seqs, place(seqs, 4))
    before, lse = twin.read(state), twin.lse(state)
    first, second = (finish(twin, seqs, state) for _ in range(2))
    assert_same_bits(
        *zip(first, second, strict=True),
        *zip(before, twin.read(state), strict=True),
        (lse, twin.lse(state)),
    )
    assert (first.lse > lse).all()
    plain = Answer(*twin.finalize(state, return_lse=True))
    np.testing.assert_allclose(plain.lse, lse, rtol=1e-6)


def test_sinks_of_minus_inf_are_none(twin):
    seqs = draw((9, 0), num_kv_heads=1)
    paged = place(seqs, 4)
    none = attend(twin, seqs, paged, sinks=np.full(2, -np.inf))
    assert_same_bits(*zip(none, attend(twin, seqs, paged), strict=True))


@pytest.mark.parametrize("dtype", [np.float64, np.float16, list])
def test_any_floats(twin, dtype):
    seqs = draw((9,), num_kv_heads=1, sinks=(5.0, -1.5))
    paged = place(seqs, 4)
    sinks = seqs.sinks.tolist() if dtype is list else seqs.sinks.astype(dtype)
    answers = (attend(twin, seqs, paged), attend(twin, seqs, paged, sinks=sinks))
    assert_same_bits(*zip(*answers, strict=True))


@pytest.mark.parametrize("window", [1, 5, 600])
def test_with_a_window_under_every_tiling(backend, window):
    """As in gpt-oss: a window of few keys, and sinks that outweigh them."""
    lens = backend.size((700, 5, 64), (14, 1))
    seqs = draw(lens, num_kv_heads=1, sliding_window=window, sinks=(3.0, -1.0), queries=2)
    for block_size, blocks in ((16, 1), (4, 7)):
        check_attention(backend, seqs, block_size, blocks)
    paged = place(seqs, 4)
    state = absorb(backend, seqs, paged, reversed(list(tiles(paged, 3))))
    check_answer(seqs, finish(backend, seqs, state))
