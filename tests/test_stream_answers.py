"""Streams give what `paged_attention` gives, whatever the room and the source."""

import threading

import numpy as np
import pytest
from _bound import assert_same_bits, check_answer
from _cases import (
    BFLOAT16,
    Answer,
    draw,
    options_of,
    place,
    sinks_of,
)
from _streaming import (
    BLOCK,
    CASES,
    LENS,
    PATIENCE,
    SOURCES,
    SPLIT,
    Watched,
    array_source,
    attend_one,
    attend_with,
    case,
    check_same,
    split_fits,
    stream,
)

import numba_attn
from numba_attn import ArraySource, Streamer

ROOMS = (1, 2, 7, 64, 10_000)


@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("name", CASES)
def test_any_room_gives_the_answer_of_one_call(name, prefetch):
    seqs, paged, expected = case(name)
    for room in ROOMS:
        answer = stream(seqs, paged, resident_blocks=room, prefetch=prefetch)
        check_same(seqs, answer, expected, bits=split_fits(seqs, BLOCK, room, prefetch))


@pytest.mark.parametrize("name", ["plain", "starts and window", "queries"])
@pytest.mark.parametrize("block_size", [1, 24, 1500])
def test_any_block_size(name, block_size):
    """Splits of 512 tokens begin within blocks of 24 and of 1500."""
    seqs, paged, expected = case(name, block_size)
    for room in (1, 2, 23, 600):
        answer = stream(seqs, paged, resident_blocks=room, prefetch=1)
        check_same(seqs, answer, expected, bits=split_fits(seqs, block_size, room, 1))


def test_partial_states_of_a_tile_are_folded_in_turn_though_they_come_in_batches(monkeypatch):
    seqs, paged, expected = case("queries")
    monkeypatch.setattr("numba_attn.kernels.cpu.PARTIAL_BYTES", 4 * 4 * 34 * 2)  # of 2 items
    check_same(seqs, stream(seqs, paged, resident_blocks=3 * 64), expected)


def test_a_tile_with_exactly_the_room_of_a_split_gives_the_bits_of_one_call():
    seqs, paged, expected = case("plain")
    answer = stream(seqs, paged, resident_blocks=2 * SPLIT // BLOCK, prefetch=1)
    check_same(seqs, answer, expected)
    answer = stream(seqs, paged, resident_blocks=2 * SPLIT // BLOCK - 1, prefetch=1)
    check_same(seqs, answer, expected, bits=False)


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("name", ["plain", "fp8", "token scales"])
def test_any_source(tmp_path, kind, name):
    seqs, paged, expected = case(name)
    source = SOURCES[kind](paged, tmp_path)
    for room in (5, 100):
        answer = stream(seqs, paged, source, resident_blocks=room)
        check_same(seqs, answer, expected, bits=room == 100)


def test_pools_of_any_strides_are_a_source():
    """Head-major, and a block apart from the next."""
    seqs, paged, expected = case("plain")
    pools = [np.repeat(pool.swapaxes(1, 2), 2, axis=0)[::2].swapaxes(1, 2) for pool in paged[:2]]
    check_same(seqs, stream(seqs, paged, ArraySource(*pools), resident_blocks=120), expected)


def test_bits_of_bfloat16_are_a_source():
    seqs, paged, expected = case("plain")
    source = ArraySource(*(pool.view(np.uint16) for pool in paged[:2]))
    check_same(seqs, stream(seqs, paged, source, resident_blocks=120), expected)


def test_a_source_of_ones_own_may_tell_no_more_than_it_must():
    """Neither num_blocks, which scales by token tell too, nor what V has in common with K."""
    seqs, paged, expected = case("token scales")
    source = Watched(array_source(paged))
    for name in ("num_blocks", "v_head_dim", "v_dtype"):
        delattr(source, name)
    check_same(seqs, stream(seqs, paged, source, resident_blocks=120), expected)


def test_blocks_of_a_common_prefix_are_read_once():
    seqs = draw((800, 770, 0, 768), num_kv_heads=2)
    prefix = 752 // BLOCK
    paged = place(seqs, BLOCK)
    for s in (1, 3):
        seqs = seqs.map(lambda q, keys, values, s=s: copy_prefix(keys, values, s, 752))
        paged.block_tables[s, :prefix] = paged.block_tables[0, :prefix]
    again = place(seqs, BLOCK)
    paged.k_pool[:], paged.v_pool[:] = again[:2]
    expected = attend_one(seqs, paged)
    check_answer(seqs, expected)
    for room in (3, 24, 120, 1000):
        source = Watched(array_source(paged))
        answer = stream(seqs, paged, source, resident_blocks=room)
        check_same(seqs, answer, expected, bits=room >= 120)
        used = {int(x) for s in (0, 1, 3) for x in paged.block_tables[s, : -(-seqs.lens[s] // 16)]}
        assert set(source.blocks) == used
        if room >= 120:
            assert source.blocks == sorted(used)


def copy_prefix(keys, values, s, tokens):
    keys[s][:tokens], values[s][:tokens] = keys[0][:tokens], values[0][:tokens]


def test_blocks_that_nobody_attends_to_are_not_read():
    seqs, paged, _ = case("starts and window")
    source = Watched(array_source(paged))
    stream(seqs, paged, source, resident_blocks=60)
    first = [580, 0, 1, 10]
    used = [
        paged.block_tables[s, first[s] // BLOCK : -(-n // BLOCK)].tolist()
        for s, n in enumerate(LENS)
    ]
    # Again only where a split ends within a block: twice here.
    assert sorted(set(source.blocks)) == sorted(sum(used, []))
    assert len(source.blocks) <= len(set(source.blocks)) + 2


def test_out_is_written_and_returned():
    seqs, paged, expected = case("sinks")
    wide = np.full((*seqs.q.shape[:2], 2, 32), 7, BFLOAT16)
    out = wide[:, :, 1]
    found, lse = stream(seqs, paged, out=out, resident_blocks=200)
    assert found is out
    check_same(seqs, Answer(out, lse), expected)
    assert (wide[:, :, 0] == 7).all()
    assert_same_bits((stream_out(seqs, paged, resident_blocks=200), expected.out))


def stream_out(seqs, paged, **options):
    options = options_of(seqs, paged) | sinks_of(seqs) | options
    return numba_attn.stream_attention(seqs.q, array_source(paged), *paged[2:], **options)


@pytest.mark.parametrize("shape", [(0, 4, 32), (2, 4, 32)])
def test_nothing_to_attend_to_reads_nothing(shape):
    _, paged, _ = case("plain")
    source = Watched(array_source(paged))
    tables, lens = np.full((shape[0], 3), -1), np.zeros(shape[0], int)
    q, options = np.ones(shape, BFLOAT16), {"resident_blocks": 4, "return_lse": True}
    told = []
    progress = {"progress": lambda *numbers: told.append(numbers)}
    out, lse = numba_attn.stream_attention(q, source, tables, lens, **options, **progress)
    assert (out.shape, lse.shape) == (shape, shape[:2])
    assert not out.any()
    assert (lse == -np.inf).all()
    assert source.reads == []
    assert told in ([], [(0, 0)])


def test_lists_and_any_integers_are_tables():
    seqs, paged, expected = case("plain")
    tables, lens = paged[2:]
    for changed in (
        (np.asfortranarray(tables.astype(np.int64)), lens.astype(np.uint16)),
        (tables.tolist(), lens.tolist()),
        (tables[:, ::-1][:, ::-1], lens[::-1][::-1]),
    ):
        answer = stream(seqs, paged._replace(block_tables=changed[0], seq_lens=changed[1]))
        check_answer(seqs, answer)
    assert answer.out.dtype == expected.out.dtype


@pytest.mark.parametrize("prefetch", [0, 1, 4])
def test_it_reads_by_as_many_threads_as_there_are_buffers(prefetch):
    seqs, paged, _ = case("plain")
    count = prefetch + 1
    gate = threading.Barrier(count, timeout=PATIENCE)
    source = Watched(array_source(paged), lambda number, ids: number < count and gate.wait())
    check_answer(seqs, stream(seqs, paged, source, resident_blocks=count, prefetch=prefetch))
    assert {thread.name.split("_")[0] for thread in source.threads} == {"numba"}
    assert len(source.threads) == count
    assert {len(ids) for ids in source.reads} == {1}


def test_tiles_are_absorbed_before_their_turn_but_not_without_end():
    """What comes first is slow: the other threads go on for a while, each in its buffer."""
    seqs, paged, _ = case("plain")
    most = 2 * 3 + 2  # with 3 buffers: 6 have their turn or wait for it, 2 wait in their buffers
    all_read, one_more = threading.Event(), threading.Event()

    def before(number, ids):
        if number == 0:
            assert all_read.wait(PATIENCE)
            assert not one_more.wait(0.2)
        elif number >= most - 1:
            (all_read if number == most - 1 else one_more).set()

    source = Watched(array_source(paged), before)
    check_answer(seqs, stream(seqs, paged, source, resident_blocks=9, prefetch=2))
    assert one_more.is_set()


def test_out_may_not_lie_in_the_pools_of_a_source():
    seqs, paged, _ = case("plain")
    for pool in paged[:2]:
        out = pool.ravel()[: seqs.q.size].reshape(seqs.q.shape)
        with (
            Streamer(9) as streamer,
            pytest.raises(ValueError, match="out: must not overlap the s"),
        ):
            attend_with(streamer, seqs, paged, ArraySource(*paged[:2]), out=out)
