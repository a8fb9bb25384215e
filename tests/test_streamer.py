"""Streams: what `paged_attention` gives, whatever the room, the source and what came before."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from _bound import assert_same_bits, check_answer, check_state
from _cases import (
    BFLOAT16,
    Answer,
    Tile,
    draw,
    options_of,
    place,
    sinks_of,
    step,
)
from _process import run
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
    file_of,
    layers_of,
    readers,
    split_fits,
    stream,
)
from test_threads import needs_fork

import numba_attn
from numba_attn import ArraySource, AttentionState, Streamer
from numba_attn._tiles import Tiles

ROOMS = (1, 2, 7, 64, 10_000)


# 1. The answer


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


def test_no_more_blocks_than_there_is_room_for_are_read_before_the_first_is_absorbed():
    """What comes first is slow: the other threads stop at their next tile."""
    seqs, paged, expected = case("plain")
    source = Watched(array_source(paged))
    seen = threading.Event()

    def wait(number, ids):
        if number == 0:
            seen.wait(0.2)  # is never set: all that could be read is read meanwhile
            read.append(sum(map(len, source.reads)))

    source.before, read = wait, []
    check_answer(seqs, stream(seqs, paged, source, resident_blocks=9, prefetch=2))
    assert read[0] <= 9


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


# 4. Threads and processes


def test_callers_at_once_take_turns():
    layers, paged, expected = layers_of(4)
    sources = [array_source(one) for one in paged]
    gate = threading.Barrier(4)

    def work(i):
        gate.wait()
        for turn in range(8):
            j = (i + turn) % 4
            following = (sources[i], *paged[i][2:]) if turn % 3 else None
            answer = attend_with(streamer, layers[j], paged[j], sources[j], then=following)
            check_same(layers[j], answer, expected[j])

    with Streamer(100) as streamer, ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


def test_a_closed_streamer_begins_anew():
    seqs, paged, expected = case("plain")
    before = readers()
    streamer = Streamer(120)
    for _ in range(2):
        source = array_source(paged)
        answer = attend_with(streamer, seqs, paged, source, then=(source, *paged[2:]))
        check_same(seqs, answer, expected)
        assert len(readers() - before) == 3
        streamer.close()
        streamer.close()
        assert readers() <= before


def test_a_call_leaves_no_thread():
    before = readers()
    seqs, paged, _ = case("plain")
    stream(seqs, paged)
    assert readers() <= before


def test_a_streamer_that_is_forgotten_leaves_no_thread():
    before = readers()
    seqs, paged, _ = case("plain")
    streamer = Streamer(4)
    source = array_source(paged)
    attend_with(streamer, seqs, paged, source, then=(source, *paged[2:]))
    left = readers() - before
    assert left
    del streamer
    for thread in left:
        thread.join(PATIENCE)
        assert not thread.is_alive()


FORK = """
import os, warnings
import numba_attn, _cases, _streaming
warnings.simplefilter("ignore")  # Python warns of a fork with threads: that is the point
seqs = _cases.draw((1100, 0, 33, 530), num_kv_heads=2)
paged = _cases.place(seqs, 16)
source = _streaming.array_source(paged)
streamer = numba_attn.Streamer(9)

def bits():
    following = {"then": (source, *paged[2:])}
    out, lse = _streaming.attend_with(streamer, seqs, paged, source, **following)
    return out.tobytes() + lse.tobytes()

before = bits()
child = os.fork()
if child == 0:
    same = bits() == before
    grandchild = os.fork()
    if grandchild == 0:
        streamer.close()
        os._exit(0 if bits() == before else 3)
    same = same and os.waitpid(grandchild, 0)[1] == 0
    streamer.close()
    os._exit(0 if same else 3)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
assert status == 0, status
assert bits() == before
"""


@needs_fork
def test_a_streamer_in_a_forked_child_and_its_child():
    run(FORK)


def test_a_streamer_ends_with_the_interpreter():
    """Neither its threads nor tiles read ahead keep a process alive."""
    run(FORK.split("child = os.fork()")[0])


@pytest.mark.parametrize("use", ["attend", "close"])
@pytest.mark.parametrize("where", ["read", "progress"])
def test_a_call_that_waits_for_itself_is_an_error(use, where):
    seqs, paged, _ = case("plain")

    def again(*_):
        streamer.close() if use == "close" else attend_with(streamer, seqs, paged)

    source, options = array_source(paged), {}
    if where == "read":
        source = Watched(source, again)
    else:
        options = {"progress": again}
    with Streamer(9) as streamer, pytest.raises(RuntimeError, match="Streamer: is in a call"):
        attend_with(streamer, seqs, paged, source, **options)


def test_out_may_not_lie_in_the_pools_of_a_source():
    seqs, paged, _ = case("plain")
    for pool in paged[:2]:
        out = pool.ravel()[: seqs.q.size].reshape(seqs.q.shape)
        with (
            Streamer(9) as streamer,
            pytest.raises(ValueError, match="out: must not overlap the s"),
        ):
            attend_with(streamer, seqs, paged, ArraySource(*paged[:2]), out=out)
