"""Streams after one another: with a state, with what was read ahead, and as a cache grows."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from _bound import assert_same_bits, check_answer, check_state
from _cases import (
    Answer,
    Tile,
    draw,
    place,
    sinks_of,
    step,
)
from _process import run
from _streaming import (
    BLOCK,
    LENS,
    PATIENCE,
    Watched,
    array_source,
    attend_one,
    attend_with,
    case,
    check_same,
    file_of,
    layers_of,
    stream,
)

import numba_attn
from numba_attn import AttentionState, Streamer
from numba_attn._tiles import Tiles

# 2. With a state


def parts_of(seqs, paged, at):
    """Cut a cache at a position: what `step` needs for the rest, what a stream for the front."""
    columns = at // BLOCK
    front = {"tile_token_counts": np.minimum(seqs.lens, at)}
    counts = np.maximum(seqs.lens - at, 0)
    starts = np.minimum(at, seqs.lens)
    rest = Tile(paged.block_tables[:, columns:], -(-counts // BLOCK), counts, starts)
    return front, rest


@pytest.mark.parametrize("name", ["plain", "window", "short window", "ragged", "alibi", "sinks"])
@pytest.mark.parametrize("room", [7, 200])
def test_a_part_in_memory_is_absorbed_first(cpu, name, room):
    seqs, paged, _ = case(name)
    front, rest = parts_of(seqs, paged, 528)
    state, expected = (cpu.like(seqs.q, paged.v_pool) for _ in range(2))
    for one in (state, expected):
        step(cpu, one, seqs, paged, rest)
    answer = stream(seqs, paged, state=state, resident_blocks=room, **front)
    check_answer(seqs, answer)
    check_state(seqs, cpu.read(state))
    whole = Tile(paged.block_tables, -(-front["tile_token_counts"] // BLOCK), *front.values())
    step(cpu, expected, seqs, paged, whole._replace(tile_starts=np.zeros(len(LENS), int)))
    if room == 200:
        assert_same_bits(*zip(cpu.read(state), cpu.read(expected), strict=True))
    out, lse = numba_attn.finalize(state, return_lse=True, **sinks_of(seqs))
    assert_same_bits((out, answer.out.reshape(out.shape)), (lse, answer.lse.reshape(lse.shape)))


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("name", ["plain", "window", "starts", "queries"])
def test_the_source_has_the_end_of_each_sequence(cpu, name, counted):
    seqs, paged, _ = case(name)
    front, (tables, _, tokens, starts) = parts_of(seqs, paged, 528)
    state = cpu.like(seqs.q, paged.v_pool)
    counts = front["tile_token_counts"]
    zero = np.zeros_like(counts)
    step(cpu, state, seqs, paged, Tile(paged.block_tables, -(-counts // BLOCK), counts, zero))
    options = {"tile_starts": starts, "state": state}
    if counted:
        options["tile_token_counts"] = tokens
    for room in (2, 150):
        own = state.__class__(*state.o.shape)
        own.buffer[:] = state.buffer
        options["state"] = own
        tail = paged._replace(block_tables=tables)
        check_answer(seqs, stream(seqs, tail, resident_blocks=room, **options))
        check_state(seqs, cpu.read(own))


def test_a_state_that_has_seen_all_stays_where_nothing_is_read(cpu):
    seqs, paged, expected = case("plain")
    _, rest = parts_of(seqs, paged, 0)
    state = cpu.like(seqs.q, paged.v_pool)
    step(cpu, state, seqs, paged, rest)
    before = state.buffer.copy()
    source = Watched(array_source(paged))
    answer = stream(seqs, paged, source, state=state, tile_token_counts=np.zeros(4, int))
    check_same(seqs, answer, expected)
    assert_same_bits((state.buffer, before))
    assert source.reads == []


# 3. Call after call


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("kind", ["arrays", "file"])
def test_layers_in_turn_read_each_block_once(tmp_path, kind, prefetch):
    layers, paged, expected = layers_of(4)
    sources = map(array_source, paged)
    if kind == "file":
        file = file_of(*paged, folder=tmp_path)
        sources = map(file.layer, range(4))
    sources = [Watched(source) for source in sources]
    with Streamer(40 * (prefetch + 1), prefetch) as streamer:
        for _ in range(3):
            for i, seqs in enumerate(layers):
                following = (sources[(i + 1) % 4], *paged[0][2:])
                answer = attend_with(streamer, seqs, paged[i], sources[i], then=following)
                check_same(seqs, answer, expected[i])
        last = attend_with(streamer, layers[0], paged[0], sources[0])
        check_same(layers[0], last, expected[0])
    used = sorted(
        sum((paged[0].block_tables[s, : -(-n // 16)].tolist() for s, n in enumerate(LENS)), [])
    )
    assert sources[0].blocks == sorted(used * 4)
    for source in sources[1:]:
        assert source.blocks == sorted(used * 3)


def told(count):
    """Return what `before` may be, and an event that is set by so many reads."""
    event, numbers = threading.Event(), []

    def before(number, ids):
        numbers.append(number)
        if len(numbers) == count:
            event.set()

    return before, event


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_the_first_tiles_of_the_next_layer_are_read_before_it_is_asked_for(prefetch):
    layers, paged, expected = layers_of(2)
    before, event = told(prefetch + 1)
    sources = Watched(array_source(paged[0])), Watched(array_source(paged[1]), before)
    with Streamer(4 * (prefetch + 1), prefetch) as streamer:
        following = (sources[1], *paged[1][2:])
        attend_with(streamer, layers[0], paged[0], sources[0], then=following)
        assert event.wait(PATIENCE)
        assert sources[1].reads == [sorted(ids) for ids in sources[1].reads]
        assert len(sources[1].reads) == prefetch + 1
        check_answer(layers[1], attend_with(streamer, layers[1], paged[1], sources[1]))
    assert len(sources[1].blocks) == sum(-(-n // BLOCK) for n in LENS)


def test_reading_ahead_leaves_a_buffer_to_a_worker_that_is_late():
    """It is to take the last tile, when the others have gone on to the next layer."""
    run("import test_streamer; test_streamer.be_late_at_the_last_tile()", timeout=PATIENCE)


def be_late_at_the_last_tile():
    layers, paged, expected = layers_of(2)
    get = Tiles.get
    for prefetch in (0, 1, 2):
        before, event = told(prefetch + 1)
        source = Watched(array_source(paged[1]), before)

        def late(tiles, index, event=event):
            found = get(tiles, index)
            if found is not None and get(tiles, index + 1) is None:
                event.wait(0.3)
            return found

        Tiles.get = late
        with Streamer(32 * (prefetch + 1), prefetch) as streamer:
            following = (source, *paged[1][2:])
            answer = attend_with(streamer, layers[0], paged[0], then=following)
            check_same(layers[0], answer, expected[0])
            check_same(layers[1], attend_with(streamer, layers[1], paged[1], source), expected[1])


def test_what_was_read_ahead_is_folded_in_order():
    """The first tile arrives last, after the next layer has been asked for."""
    layers, paged, expected = layers_of(2)
    asked_for, others = threading.Event(), threading.Event()

    def first_is_late(number, ids):
        if number == 0:
            assert asked_for.wait(PATIENCE)
        elif number == 2:
            others.set()

    source = Watched(array_source(paged[1]), first_is_late)
    with Streamer(3 * 32, 2) as streamer, ThreadPoolExecutor(1) as pool:
        attend_with(streamer, layers[0], paged[0], then=(source, *paged[1][2:]))
        assert others.wait(PATIENCE)
        coming = pool.submit(attend_with, streamer, layers[1], paged[1], source)
        asked_for.set()
        check_same(layers[1], coming.result(), expected[1])


OTHERS = {
    "lens": lambda p, o: (p._replace(seq_lens=p.seq_lens - [1, 0, 17, 0]), o),
    "tables": lambda p, o: (p._replace(block_tables=p.block_tables[:, :-1]), o),
    "window": lambda p, o: (p, o | {"sliding_window": 100}),
    "starts": lambda p, o: (p, o | {"seq_starts": np.array([5, 0, 33, 0])}),
    "not causal": lambda p, o: (p, o | {"causal": False}),
    "parts": lambda p, o: (p, o | {"tile_token_counts": p.seq_lens // 2}),
}


@pytest.mark.parametrize("what", OTHERS)
def test_a_call_that_asks_for_something_else_than_announced_is_right(what):
    layers, paged, expected = layers_of(2, queries=2)
    seqs, source = layers[1], Watched(array_source(paged[1]))
    with Streamer(120) as streamer:
        for _ in range(2):
            following = (source, *paged[1][2:])
            attend_with(streamer, layers[0], paged[0], then=following)
            changed, options = OTHERS[what](paged[1], {})
            answer = attend_with(streamer, seqs, changed, source, **options)
            if what != "parts":
                one = attend_one(seqs, changed, **options)
            else:
                one = attend_part(seqs, changed, **options)
            check_same(seqs, answer, one)
            check_same(seqs, attend_with(streamer, seqs, paged[1], source), expected[1])


def attend_part(seqs, paged, tile_token_counts):
    state = AttentionState.like(seqs.q, paged.v_pool)
    numba_attn.step_tile(
        state,
        seqs.q,
        *paged[:2],
        paged.block_tables,
        -(-tile_token_counts // BLOCK),
        tile_token_counts=tile_token_counts,
        tile_starts=np.zeros(len(LENS), int),
        seq_lens=paged.seq_lens,
    )
    out, lse = numba_attn.finalize(state, return_lse=True)
    return Answer(out.reshape(seqs.q.shape), lse.reshape(seqs.q.shape[:-1]))


def test_another_source_than_announced():
    layers, paged, expected = layers_of(3)
    with Streamer(120) as streamer:
        for i in (0, 2, 1, 0):
            following = (array_source(paged[1]), *paged[1][2:])
            answer = attend_with(streamer, layers[i], paged[i], then=following)
            check_same(layers[i], answer, expected[i])


@pytest.mark.parametrize("array", ["block_tables", "seq_lens"])
def test_an_array_that_is_changed_in_place_is_read_anew(array):
    """The caller owns its arrays: they may change as soon as a call has returned."""
    layers, paged, _ = layers_of(2)
    streamed, source = paged[1], array_source(paged[1])
    with Streamer(120) as streamer:
        for turn in range(3):
            attend_with(streamer, layers[0], paged[0], then=(source, *streamed[2:]))
            if array == "seq_lens":
                streamed.seq_lens[0] -= 100 * turn
            else:
                streamed.block_tables[[0], :20] = streamed.block_tables[[0], 20:40]
            answer = attend_with(streamer, layers[1], streamed, source)
            check_same(layers[1], answer, attend_one(layers[1], streamed))


def test_steps_that_append_to_the_file(tmp_path):
    """A token more each step, in each layer, over the ends of blocks."""
    layers = [draw((50, 630), num_kv_heads=2, seed=seed) for seed in range(2)]
    paged = [place(seqs, BLOCK) for seqs in layers]
    zeros = [
        one._replace(k_pool=one.k_pool * 0, v_pool=one.v_pool * 0)
        for one in (place(seqs, BLOCK, fill=0) for seqs in layers)
    ]
    ends = layers[0].lens
    with file_of(*zeros, folder=tmp_path) as file, Streamer(100, prefetch=1) as streamer:
        before = np.zeros_like(ends)
        for lens in ends - np.arange(18)[::-1, None]:
            for layer, (seqs, one) in enumerate(zip(layers, paged, strict=True)):
                append(file, layer, seqs, one, before, lens)
                now = one._replace(seq_lens=lens)
                answer = attend_with(streamer, seqs, now, file.layer(layer))
                check_same(seqs, answer, attend_one(seqs, now))
            before = lens


def append(file, layer, seqs, paged, begins, ends):
    """Append some tokens of each sequence."""
    for s, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        token = np.arange(begin, end)
        slots = paged.block_tables[s, token // BLOCK].astype(np.int64) * BLOCK + token % BLOCK
        file.append_kv(layer, seqs.keys[s][begin:end], seqs.values[s][begin:end], slots)


def test_layers_of_different_geometry_in_turn():
    """Buffers are made anew where blocks are others."""
    kinds = [
        case("plain"),
        case("plain", 24),
        case("fp8"),
        case("formats apart"),
        case("queries"),
    ]
    with Streamer(200, prefetch=1) as streamer:
        for i in [0, 1, 1, 2, 3, 4, 0, 3, 0, 2]:
            seqs, paged, expected = kinds[i]
            check_same(seqs, attend_with(streamer, seqs, paged), expected)
            following = (array_source(kinds[1][1]), *kinds[1][1][2:])
            if i in (0, 1, 2):
                answer = attend_with(streamer, seqs, paged, then=following)
                check_same(seqs, answer, expected)


def test_the_same_bits_25_times():
    seqs, paged, _ = case("plain")
    source = array_source(paged)
    with Streamer(9) as streamer:
        first = attend_with(streamer, seqs, paged, source)
        check_answer(seqs, first)
        for _ in range(25):
            answer = attend_with(streamer, seqs, paged, source, then=(source, *paged[2:]))
            assert_same_bits(*zip(first, answer, strict=True))
