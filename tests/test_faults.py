"""Faults that other decode-attention kernels have had, each with the small input that shows it.

Kinds that have test files of their own: strides (test_layouts), sizes (test_cover), 64-bit offsets
(test_memory), merging (test_merge), threads (test_threads).
"""

import numpy as np
import pytest
from _bound import assert_same_bits, check_answer, check_state
from _cases import BFLOAT16, Answer, absorb, attend, draw, place, tiles
from _checks import check_attention

from numba_attn import _plan
from numba_attn._call import Tile


def filled(q, k, v, tokens, *, head_dim=32):
    """Make a case with one value everywhere in q, in k and in v."""

    def fill(queries, keys, values):
        queries[:] = q
        keys[0][:], values[0][:] = k, v

    return draw((tokens,), head_dim=head_dim, num_kv_heads=1).map(fill)


def test_01_unfilled_slots_of_the_last_block(backend):
    seqs = draw((13,))
    paged = place(seqs, 4, fill=np.nan)
    check_answer(seqs, attend(backend, seqs, paged))


@pytest.mark.parametrize("tail", [np.nan, np.inf])
def test_02_masked_values_are_skipped_not_multiplied_by_0(backend, tail):
    seqs = draw((13,))
    paged = place(seqs, 4)
    paged.k_pool[np.isnan(paged.k_pool)] = 0
    paged.v_pool[np.isnan(paged.v_pool)] = tail
    check_answer(seqs, attend(backend, seqs, paged))


def test_03_padding_is_not_in_the_denominator(backend):
    seqs = draw((5,)).map(lambda q, keys, values: q.fill(0))
    answer = attend(backend, seqs, place(seqs, 16, fill=0))
    check_answer(seqs, answer)
    mean = np.repeat(seqs.values[0].astype(np.float64).mean(axis=0), 2, axis=0)
    np.testing.assert_allclose(answer.out[0].astype(np.float64), mean, rtol=2**-8)
    np.testing.assert_allclose(answer.lse, np.log(5), rtol=1e-6)


def test_04_length_0_is_written(backend):
    seqs = draw((0, 5))
    out = np.full(seqs.q.shape, 7, BFLOAT16)
    lse = backend.paged_attention(seqs.q, *place(seqs, 16), out=out, return_lse=True)[1]
    assert (out[0] == 0).all()
    check_answer(seqs, Answer(out, lse))


def test_06_lse_of_an_empty_row_is_minus_inf_on_every_path(backend):
    seqs = draw((0, 5), num_kv_heads=1)
    paged = place(seqs, 4)
    for state in (absorb(backend, seqs, paged), absorb(backend, seqs, paged, tiles(paged, 1))):
        for lse in (backend.lse(state), backend.finalize(state, return_lse=True)[1]):
            assert (lse[0] == -np.inf).all()
    assert (attend(backend, seqs, paged).lse[0] == -np.inf).all()


def test_07_logits_far_below_any_sentinel(backend):
    seqs = filled(64, -64, 1, backend.size(37, 9), head_dim=128)
    paged = place(seqs, 16)
    out, _ = attend(backend, seqs, paged)
    assert (out == 1).all()
    for cut in (1, 2):
        state = absorb(backend, seqs, paged, tiles(paged, cut))
        assert (backend.finalize(state) == 1).all()


@pytest.mark.parametrize("first", [4, 16, 512])
def test_08_a_first_tile_of_weight_0(backend, first):
    """Logits of -inf in the whole first tile, group or split: nothing to rescale from."""
    first = min(first, backend.size(512, 16))
    seqs = draw((first + 9, first), num_kv_heads=1)

    def never(q, keys, values):
        q[..., 0] = 1
        for k in keys:
            k[:first, :, 0] = -np.inf

    seqs = seqs.map(never)
    check_attention(backend, seqs, 4, blocks_per_tile=first // 4)
    assert (attend(backend, seqs, place(seqs, 4)).lse[1] == -np.inf).all()


@pytest.mark.parametrize("fault", ["length", "id", "negative id", "negative length"])
def test_10_reading_out_of_bounds_is_an_error_before_any_write(twin, fault):
    seqs = draw((5, 9))
    k_pool, v_pool, tables, lens = place(seqs, 4)
    name = "seq_lens" if "length" in fault else "block_tables"
    if "length" in fault:
        lens[1] = -1 if fault == "negative length" else tables.shape[1] * 4 + 1
    else:
        tables[1, 2] = -1 if fault == "negative id" else len(k_pool)
    out = np.full(seqs.q.shape, 7, BFLOAT16)
    with pytest.raises(ValueError, match=name):
        twin.paged_attention(seqs.q, k_pool, v_pool, tables, lens, out=out)
    assert (out == 7).all()


@pytest.mark.parametrize("counts", [[2, 4], [2, 5], [-1, 3]])
def test_10_so_it_is_in_a_tile(twin, counts):
    seqs = draw((5, 9))
    k_pool, v_pool, tables, _ = place(seqs, 4)
    state = twin.like(seqs.q, v_pool)
    with pytest.raises(ValueError, match="tile_block"):
        twin.step_tile(state, seqs.q, k_pool, v_pool, tables, np.array(counts))
    fresh = twin.like(seqs.q, v_pool)
    assert_same_bits(*zip(twin.read(state), twin.read(fresh), strict=True))


def test_11_stale_ids_are_not_followed(backend):
    seqs = draw((5, 0, 4))
    answers = [
        attend(backend, seqs, place(seqs, 4, ids=ids))
        for ids in ((0,), (-1,), (2147480000,), (-(2**31), 2**31 - 1))
    ]
    check_answer(seqs, answers[0])
    for answer in answers[1:]:
        assert_same_bits(*zip(answers[0], answer, strict=True))


@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "head_dim"),
    [(28, 4, 128), (40, 8, 40), (9, 3, 20), (71, 1, 64), (64, 2, 64)],
)
def test_12_any_ratio_of_heads(cpu, q_heads, kv_heads, head_dim):
    gqa = q_heads // kv_heads
    check_attention(cpu, draw((37,), gqa=gqa, num_kv_heads=kv_heads, head_dim=head_dim), 16)


@pytest.mark.parametrize("head_dim", [1, 13, 112, 160, 320])
def test_13_any_head_dim(backend, head_dim):
    lens = backend.size((37, 5), (5,))
    seqs = draw(lens, gqa=1, num_kv_heads=backend.size(3, 1), head_dim=head_dim)
    check_attention(backend, seqs, 16)


@pytest.mark.parametrize("block_size", [1, 3, 5, 8, 17])
def test_15_any_block_size(backend, block_size):
    seqs = draw(backend.size((67, block_size, 1), (20, 1)), num_kv_heads=1)
    check_attention(backend, seqs, block_size)


def test_19_a_row_does_not_see_its_batch(twin):
    """Poison the other rows' tokens: a row that reads them shows it."""
    seqs = draw(twin.size((40, 530, 17), (9, 5, 3)))

    def poison(q, keys, values):
        for row in (0, 2):
            q[row], keys[row][:], values[row][:] = np.nan, np.nan, np.nan

    poisoned = seqs.map(poison)
    a, b = (attend(twin, s, place(s, 4)) for s in (seqs, poisoned))
    assert_same_bits((a.out[1], b.out[1]), (a.lse[1], b.lse[1]))
    assert np.isnan(b.out[[0, 2]]).all()


def test_20_partials_are_not_rounded_between_64_splits(cpu):
    seqs = draw((64 * cpu.split_tokens,), num_kv_heads=1)
    check_state(seqs, cpu.read(absorb(cpu, seqs, place(seqs, 16))))


def test_20_partials_are_not_rounded_between_tiles(backend):
    seqs = draw((backend.size(640, 12),), num_kv_heads=1)
    paged = place(seqs, 1)
    check_state(seqs, backend.read(absorb(backend, seqs, paged, tiles(paged, 1))))


def test_23_one_long_sequence_fills_all_cores():
    lens = np.array([32768], np.int32)
    assert len(_plan.cut(Tile(None, lens)).items) == 64


@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17])
def test_25_few_tokens(backend, tokens):
    seqs = draw((tokens,))
    answer = attend(backend, seqs, place(seqs, 16))
    check_answer(seqs, answer)
    if tokens == 1:
        assert_same_bits((answer.out[0], np.repeat(seqs.values[0][0], 2, axis=0)))


def test_26_a_wider_table_changes_no_bit(backend):
    seqs = draw((13, 5))
    paged = place(seqs, 4)
    wide = np.full((2, 40), 2147480000, np.int32)
    wide[:, : paged.block_tables.shape[1]] = paged.block_tables
    answers = [attend(backend, seqs, paged._replace(block_tables=t)) for t in (paged[2], wide)]
    assert_same_bits(*zip(*answers, strict=True))


@pytest.mark.parametrize("shape", ["no sequences", "no columns", "no blocks"])
def test_empty_shapes(backend, shape):
    seqs = draw((0, 0))
    if shape == "no sequences":
        seqs = seqs.rows(0).rows()
        paged = place(draw((5,)), 4)._replace(
            block_tables=np.zeros((0, 3), np.int32), seq_lens=np.zeros(0, np.int32)
        )
    else:
        paged = place(seqs, 4)
        blocks = 0 if shape == "no blocks" else 2
        paged = paged._replace(
            k_pool=paged.k_pool[:blocks],
            v_pool=paged.v_pool[:blocks],
            block_tables=np.zeros((2, 0 if shape == "no columns" else 1), np.int32),
        )
    out, lse = backend.paged_attention(seqs.q, *paged, return_lse=True)
    assert out.shape == seqs.q.shape
    assert (lse == -np.inf).all()
    state = backend.like(seqs.q, paged.v_pool)
    backend.step_tile(state, seqs.q, *paged)
    assert backend.finalize(state).shape == seqs.q.shape
