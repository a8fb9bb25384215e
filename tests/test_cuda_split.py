"""The kernel `split`: it has the bits of `simple`, whatever there is to cut and to fold."""

import numpy as np
import pytest
from _bound import assert_same_bits, check_answer
from _cases import Answer, draw, place
from _on_device import step_cuda, to_device, twin

import numba_attn
from numba_attn import AttentionState, _arrays, _device, _plan_cuda

pytestmark = pytest.mark.cuda
SPLIT = _plan_cuda.SPLIT_TOKENS


def answers(seqs, paged, **options):
    """Return the answers of both kernels."""
    found = []
    for kernel in ("simple", "split"):
        out, lse = numba_attn.paged_attention(
            seqs.q, *paged, device="cuda", kernel=kernel, return_lse=True, **options
        )
        found.append(Answer(out, lse))
    return found


SHAPES = {  # lengths, kv heads, heads of each, D, Dv, block size
    "one head": ((SPLIT + 40, 3), 1, 1, 8, 8, 16),
    "several heads": ((2 * SPLIT + 1,), 2, 3, 16, 8, 24),
    "a last group of fewer heads": ((40, 0, 70), 1, 13, 128, 128, 8),
    "padded rows": ((SPLIT + 33, 31), 2, 5, 12, 20, 7),
    "rows of more than a warp": ((35, 1), 1, 2, 264, 140, 5),
    "no tokens at all": ((0, 0), 2, 2, 8, 8, 4),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_both_kernels_have_the_same_bits(shape):
    lens, num_kv_heads, gqa, head_dim, v_head_dim, block_size = shape
    seqs = draw(lens, num_kv_heads=num_kv_heads, gqa=gqa, head_dim=head_dim, v_head_dim=v_head_dim)
    simple, split = answers(seqs, place(seqs, block_size))
    check_answer(seqs, split)
    assert_same_bits(*zip(simple, split, strict=True))


def options_of(seqs, paged, rng):
    shape = paged.k_pool.shape[:3]
    num_q_heads = seqs.q.shape[1]
    return {
        "softcap": {"softcap": 3.0},
        "window": {"sliding_window": 45},
        "alibi": {"alibi_slopes": rng.uniform(0, 0.1, num_q_heads)},
        "sinks": {"sinks": rng.standard_normal(num_q_heads)},
        "starts": {"seq_starts": np.array([9, 0], np.int32)},
        "head scales": {"k_scale": rng.uniform(0.5, 2, shape[2]), "v_scale": 3.0},
        "token scales": {
            "k_scale": rng.uniform(0.5, 2, shape),
            "v_scale": rng.uniform(0.5, 2, shape),
        },
    }


@pytest.mark.parametrize(
    "name", ["softcap", "window", "alibi", "sinks", "starts", "head scales", "token scales"]
)
def test_both_kernels_have_the_same_bits_with_an_option(name):
    seqs = draw((SPLIT + 20, 60), num_kv_heads=2, gqa=3, head_dim=16)
    paged = place(seqs, 16)
    options = options_of(seqs, paged, np.random.default_rng(0))[name]
    simple, split = answers(seqs, paged, **options)
    exact = numba_attn.reference.paged_attention(seqs.q, *paged, **options).astype(np.float32)
    np.testing.assert_allclose(split.out.astype(np.float32), exact, rtol=0.01, atol=0.01)
    assert_same_bits(*zip(simple, split, strict=True))


def test_splits_are_done_in_turn_where_memory_is_short(monkeypatch):
    """The partial states of a step have a limit; the fold goes on from round to round."""
    seqs = draw((3 * SPLIT + 5, SPLIT - 1, 0), num_kv_heads=1, gqa=2, head_dim=8)
    paged, launched = place(seqs, 32), []
    whole = answers(seqs, paged)
    launch = twin().launch
    monkeypatch.setattr(twin(), "PARTIAL_BYTES", 1)
    monkeypatch.setattr(twin(), "launch", lambda *args: (launched.append(args), launch(*args)))
    in_turn = answers(seqs, paged)
    kernels = [args[0] for args in launched]
    assert kernels.count(step_cuda().list_items) == 4
    assert_same_bits(*zip(whole[1], in_turn[1], strict=True))


def test_more_jobs_than_blocks(monkeypatch):
    seqs = draw((SPLIT + 1, 40, 7), num_kv_heads=2, gqa=1, head_dim=8)
    paged = place(seqs, 16)
    found = []
    for blocks in (1, 3, 100):
        monkeypatch.setattr(twin(), "MOST_BLOCKS", blocks)
        found.append(answers(seqs, paged)[1])
    assert_same_bits(*zip(found[0], found[1], strict=True), *zip(found[0], found[2], strict=True))


def on_device(seqs, paged):
    return [to_device(array) for array in (seqs.q, *paged)]


def test_a_state_that_is_given_is_worked_in_and_nothing_is_allocated(monkeypatch):
    seqs = draw((SPLIT + 9, 12), num_kv_heads=1, gqa=2, head_dim=8)
    paged = place(seqs, 16)
    expected = answers(seqs, paged)[1]
    given = on_device(seqs, paged)
    state = AttentionState(*seqs.q.shape, device="cuda")
    out = to_device(np.zeros(seqs.q.shape, np.uint16))
    for turn in range(3):
        if turn:  # all that a step needs is there

            def refuse(*args, **options):
                raise AssertionError("allocated")

            monkeypatch.setattr(_device.cuda(), "device_array", refuse)
        result = numba_attn.paged_attention(*given, state=state, out=out)
        assert result is out
        assert_same_bits((_arrays.to_host(out), expected.out.view(np.uint16)))
    monkeypatch.undo()
    assert_same_bits((_arrays.to_host(state.lse), expected.lse))


def test_a_given_state_on_the_cpu():
    seqs = draw((30, 4), num_kv_heads=1, gqa=2, head_dim=8)
    paged = place(seqs, 16)
    state = AttentionState(*seqs.q.shape)
    state.m[:], state.l[:], state.o[:] = 1, 2, 3
    out, lse = numba_attn.paged_attention(seqs.q, *paged, state=state, return_lse=True)
    expected = numba_attn.paged_attention(seqs.q, *paged, return_lse=True)
    assert_same_bits((out, expected[0]), (lse, expected[1]), (state.lse, expected[1]))


def test_launches_are_made_on_the_stream_that_is_named(monkeypatch):
    """Whatever library a stream is of; other threads and later calls are not concerned."""
    streams = []
    monkeypatch.setattr(_device, "as_stream", lambda stream: ("numba", stream))

    def configured(kernel, blocks, threads, stream):
        streams.append(stream)
        return lambda *args: None

    monkeypatch.setattr(twin(), "configured", configured)
    seqs = draw((9,), num_kv_heads=1, gqa=1, head_dim=8)
    given = on_device(seqs, place(seqs, 16))
    state = AttentionState(*seqs.q.shape, device="cuda")
    streams.clear()
    out = to_device(np.zeros(seqs.q.shape, np.uint16))
    numba_attn.paged_attention(*given, state=state, out=out, stream="mine")
    assert streams == [("numba", "mine")] * 3
    state.reset()
    assert streams[3:] == [0]


class Stream:
    """A stream as one library or another has it."""

    def __init__(self, **names):
        vars(self).update(names)


@pytest.mark.parametrize(
    "stream",
    [7, Stream(cuda_stream=7), Stream(ptr=7), Stream(__cuda_stream__=lambda: (0, 7))],
)
def test_streams_of_other_libraries(monkeypatch, stream):
    def external_stream(pointer):
        return "numba", pointer

    monkeypatch.setattr(_device.cuda(), "external_stream", external_stream, raising=False)
    assert _device.as_stream(stream) == ("numba", 7)
    assert _device.as_stream(0) == 0


def test_a_stream_of_numba_is_taken_as_it_is():
    stream = _device.cuda().stream()
    assert _device.as_stream(stream) is stream
