"""Streams of the suite's cases, and sources that tell, wait or fail."""

from __future__ import annotations

import functools
import threading

import numpy as np
import pytest
from _bound import assert_same_bits, check_answer
from _cases import INT8_SCALE, Answer, draw, options_of, place, sinks_of

import numba_attn
from numba_attn import AttentionState, _device
from numba_attn.sources import Layout

SPLIT = _device.backend("cpu").SPLIT
PATIENCE = 60  # seconds until a test that waits has failed
LENS = (1100, 0, 33, 530)
BLOCK = 16

CASES = {
    "plain": {},
    "window": {"sliding_window": 600},
    "short window": {"sliding_window": 5},
    "starts": {"starts": (300, 0, 33, 7)},
    "starts and window": {"starts": (300, 0, 1, 7), "sliding_window": 520},
    "sinks": {"sinks": (0.5, -2.0)},
    "softcap": {"softcap": 1.5},
    "alibi": {"alibi_slopes": (0.05, 0.001)},
    "fp8": {"dtypes": ("bfloat16", "float8_e4m3fn", "float8_e4m3fn"), "k_scale": (0.5, 1.7)},
    "int8": {"dtypes": ("bfloat16", "int8", "int8"), "k_scale": INT8_SCALE, "v_scale": INT8_SCALE},
    "token scales": {"dtypes": ("bfloat16", "int8", "int8"), "token_scales": True},
    "queries": {"queries": 3},
    "ragged": {"queries": (3, 0, 1, 2), "starts": (300, 0, 1, 7)},
    "queries and window": {"queries": 3, "sliding_window": 40},
    "not causal": {"queries": 3, "causal": False, "sliding_window": 40},
    "every option": {
        **{"softcap": 20.0, "alibi_slopes": (0.3, 0.02), "sinks": (1.0, 2.0), "scale": 0.3},
        **{"starts": (300, 0, 1, 7), "queries": (3, 0, 1, 2), "sliding_window": 515},
        "token_scales": True,
    },
    "formats apart": {"dtypes": ("float32", "int8", "float8_e4m3fn"), "k_scale": INT8_SCALE},
    "dims apart": {"head_dim": 40, "v_head_dim": 24, "gqa": 16},
}


class Watched:
    """Another source: `before` is called with each read's number and ids, and may fail."""

    def __init__(self, source, before=lambda number, ids: None):
        self.source, self.before = source, before
        for name, value in Layout.of(source)._asdict().items():
            setattr(self, name, value)
        if hasattr(source, "num_blocks"):
            self.num_blocks = source.num_blocks
        self.reads = []  # ids of each
        self.threads = set()
        self._lock = threading.Lock()

    def read(self, block_ids, k_out, v_out):
        with self._lock:
            number = len(self.reads)
            self.reads.append(block_ids.tolist())
            self.threads.add(threading.current_thread())
        self.before(number, block_ids)
        return self.source.read(block_ids, k_out, v_out)

    @property
    def blocks(self):
        """Ids of all that was read, ascending."""
        return sorted(sum(self.reads, []))


def array_source(paged, folder=None):
    return numba_attn.ArraySource(*paged[:2])


def mapped_source(paged, folder):
    """Map both pools from files."""
    pools = []
    for name, pool in zip("kv", paged[:2], strict=True):
        file = np.memmap(folder / name, np.uint8, "w+", shape=pool.nbytes)
        file[:] = pool.view(np.uint8).ravel()
        pools.append(file.view(pool.dtype).reshape(pool.shape))
        assert isinstance(pools[-1], np.memmap)
    return numba_attn.ArraySource(*pools)


def file_of(*layers, folder, **options):
    """Write pools of one geometry as the layers of a file, which is open."""
    num_blocks, block_size, num_kv_heads, head_dim = layers[0].k_pool.shape
    sizes = {"block_size": block_size, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    sizes |= {"num_layers": len(layers), "num_blocks": num_blocks, "dtype": layers[0].k_pool.dtype}
    file = numba_attn.KVFile.create(folder / "kv", **sizes, **options)
    for index, paged in enumerate(layers):
        file.write_blocks(index, np.arange(num_blocks), *paged[:2])
    return file


def file_source(paged, folder):
    return file_of(paged, folder=folder).layer(0)


SOURCES = {"arrays": array_source, "mapped": mapped_source, "file": file_source}


def arguments(seqs, paged):
    """Return the options of a call."""
    return options_of(seqs, paged) | sinks_of(seqs) | {"return_lse": True}


def stream(seqs, paged, source=None, **options) -> Answer:
    """Attend in one streamed call, with room for 7 blocks by default."""
    source = array_source(paged) if source is None else source
    options = {"resident_blocks": 7} | arguments(seqs, paged) | options
    return Answer(*numba_attn.stream_attention(seqs.q, source, *paged[2:], **options))


def attend_with(streamer, seqs, paged, source=None, **options) -> Answer:
    """Attend by a streamer."""
    source = array_source(paged) if source is None else source
    options = arguments(seqs, paged) | options
    return Answer(*streamer.attend(seqs.q, source, *paged[2:], **options))


def readers():
    """Return the threads of streams that are alive."""
    return {t for t in threading.enumerate() if t.name.startswith("numba_attn reader")}


@functools.cache
def case(name, block_size=BLOCK):
    """Return a case, as it is paged, and what one call answers, which is in the bound."""
    seqs = draw(LENS, num_kv_heads=2, **CASES[name])
    paged = place(seqs, block_size)
    answer = attend_one(seqs, paged)
    check_answer(seqs, answer)
    return seqs, paged, answer


def split_fits(seqs, block_size, room, prefetch):
    """Tell whether a tile has room for a split, wherever that begins."""
    most = room // min(room, prefetch + 1)
    aligned = seqs.starts is None and SPLIT % block_size == 0
    return most >= (SPLIT // block_size if aligned else (SPLIT + block_size - 2) // block_size + 1)


def check_same(seqs, answer, expected, *, bits=True):
    """Check that an answer has the expected bits, or else is in the bound."""
    if bits:
        assert_same_bits(*zip(answer, expected, strict=True))
    else:
        check_answer(seqs, answer)


def attend_one(seqs, paged, **options):
    """Attend in one call over the pools."""
    options = arguments(seqs, paged) | options
    return Answer(*numba_attn.paged_attention(seqs.q, *paged, **options))


def layers_of(count, **options):
    """Draw layers of one batch, whose blocks lie at the same places; and what each answers."""
    layers = [draw(LENS, num_kv_heads=2, seed=seed, **options) for seed in range(count)]
    paged = [place(seqs, BLOCK) for seqs in layers]
    return layers, paged, [attend_one(*pair) for pair in zip(layers, paged, strict=True)]


TILES = 37  # with room for 3 blocks each, of all blocks of LENS


class FaultError(Exception):
    pass


def fail_at(number, error):
    """Return what lets a source fail at its n-th read."""

    def before(at, ids):
        if at == number:
            raise error

    return before


def check_untouched(streamer, error, seqs, paged, source, **options):
    """Check that a call fails, and that it writes nothing and leaves no thread; return the error.

    Then the streamer is as good as new.
    """
    state = AttentionState.like(seqs.q, paged.v_pool)
    state.buffer[:] = np.arange(state.buffer.size)
    out = np.full((*seqs.q.shape[:-1], paged.v_pool.shape[3]), 7, seqs.q.dtype)
    arrays = seqs.q, paged.block_tables, paged.seq_lens, out, state.buffer
    contents = [array.tobytes() for array in arrays]
    threads = readers()
    with pytest.raises(error) as caught:
        attend_with(streamer, seqs, paged, source, state=state, out=out, **options)
    assert [array.tobytes() for array in arrays] == contents
    assert not readers() - threads
    again, expected = attend_with(streamer, seqs, paged), case("plain")[2]
    check_same(seqs, again, expected, bits=False)
    return caught.value
