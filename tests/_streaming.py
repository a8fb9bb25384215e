"""Streams of the suite's cases, and sources that tell, wait or fail."""

from __future__ import annotations

import threading

import numpy as np
from _cases import Answer, options_of, sinks_of

import numba_attn
from numba_attn import _device
from numba_attn.sources import Layout

SPLIT = _device.backend("cpu").SPLIT
PATIENCE = 60  # seconds until a test that waits has failed


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
    """Return the options of a streamed call."""
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
