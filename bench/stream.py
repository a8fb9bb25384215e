"""Attention streamed from a file, beside a plain read of it, and beside the same in memory.

    python bench/stream.py --dir DIR

The shape is W1's: 32 query heads, 8 kv heads, head_dim 128, blocks of 16 tokens, in bfloat16.
All run in bursts, in turn, in one process. "cold": what is in the page cache of the file is dropped
before each call. "direct": past the page cache.
"""

import argparse
import copy
import itertools
import mmap
import os
import pathlib
import shutil
import statistics
import sys
import tempfile
import threading
import time

import ml_dtypes
import numpy as np

import numba_attn
from numba_attn import _machine, _measure
from numba_attn._stream_demo import drop_from_cache

HEADS, KV_HEADS, DIM, BLOCK = 32, 8, 128, 16
BLOCK_BYTES = 2 * 2 * BLOCK * KV_HEADS * DIM
PROBE_BYTES = 8 << 20  # of a read
LAYERS = 32
LAYER_BYTES = 128 << 20  # of one of them, W1's
HEADER = 4096


def main(arguments=None):
    """Print a row per comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=pathlib.Path, required=True, help="where to put the files")
    parser.add_argument("--mib", type=int, default=1024, help="of K/V (default 1024)")
    parser.add_argument("--tile-mib", type=float, default=8, help="of a tile (default 8)")
    parser.add_argument("--prefetch", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=20.0, help="per comparison (default 20)")
    options = parser.parse_args(arguments)
    print(f"CPU: {_machine.cpu_name()}, {numba_attn.get_num_threads()} threads")
    folder = pathlib.Path(tempfile.mkdtemp(dir=options.dir))
    try:
        compare(folder, options)
    finally:
        shutil.rmtree(folder)
    return 0


def compare(folder, options):
    """Make the files, and run the comparisons."""
    num_blocks = options.mib * (1 << 20) // BLOCK_BYTES
    tile_blocks = max(1, int(options.tile_mib * (1 << 20)) // BLOCK_BYTES)
    streamer = numba_attn.Streamer(tile_blocks * (options.prefetch + 1), options.prefetch)
    with streamer:
        one = Files(folder / "one", 1, num_blocks, streamer)
        many = Files(folder / "many", LAYERS, max(1, num_blocks // LAYERS), streamer)
        report("page cache", one.calls(drop=False, direct=False), options.seconds)
        mixed = one.shuffled()
        report("page cache, shuffled table", mixed.calls(drop=False, direct=False), options.seconds)
        report("cold", one.calls(drop=True, direct=False), options.seconds)
        report("direct", one.calls(drop=False, direct=True), options.seconds)
        report("direct, shuffled table", mixed.calls(drop=False, direct=True), options.seconds)
        report(f"{LAYERS} layers, direct", many.calls(drop=False, direct=True), options.seconds)
        for factor in (0.5, 1.0, 2.0):
            name = f"a store, {factor} x as fast as attention"
            report(name, one.paced_calls(factor), options.seconds)
        layers = one.layers(LAYERS, LAYER_BYTES // BLOCK_BYTES)
        for factor in (0.5, 1.0, 2.0):
            name = f"{LAYERS} layers, a store {factor} x as fast"
            report(name, layers.paced_calls(factor), options.seconds)


def report(name, calls, seconds):
    """Time "read", "memory" and "streamed"; print medians and what streaming costs."""
    times = _measure.in_turn({what: [call] for what, call in calls.items()}, seconds, burst=3)
    read, memory, streamed = (statistics.median(times[what]) for what in calls)
    print(
        f"{name:36} read {1e3 * read:8.1f} ms, attention in memory {1e3 * memory:7.1f} ms, "
        f"streamed {1e3 * streamed:8.1f} ms: {read / streamed:.2f} of the read, "
        f"{memory / streamed:.2f} of memory, {streamed / max(read, memory):.2f} x the longer one",
        flush=True,
    )


class Pools:
    """Layers of K/V in memory, and one query."""

    def __init__(self, pools, streamer):
        rng = np.random.default_rng(0)
        self.pools, self.streamer = pools, streamer
        self.num_blocks = len(pools[0][0])
        self.q = rng.standard_normal((1, HEADS, DIM)).astype(ml_dtypes.bfloat16)
        self.tables = np.arange(self.num_blocks, dtype=np.int32)[None]
        self.lens = np.array([self.num_blocks * BLOCK], np.int32)

    def layers(self, num_layers, num_blocks):
        """Return so many layers of so many blocks, which are parts of these, again and again."""
        num_blocks = min(num_blocks, self.num_blocks)
        parts = [
            (k_pool[at : at + num_blocks], v_pool[at : at + num_blocks])
            for k_pool, v_pool in self.pools
            for at in range(0, self.num_blocks - num_blocks + 1, num_blocks)
        ]
        return Pools(list(itertools.islice(itertools.cycle(parts), num_layers)), self.streamer)

    def paced_calls(self, factor):
        """Compare with a store that takes so much of the time of attention for what is read."""
        times = _measure.in_turn({"memory": [self._in_memory]}, 1.0, burst=3)["memory"]
        seconds = statistics.median(times) / (self.num_blocks * len(self.pools)) / factor
        link = Link(seconds)
        sources = [Paced(*pair, link) for pair in self.pools]

        def read():
            for source in sources:
                source.read(range(self.num_blocks), None, None)

        return {
            "read": read,
            "memory": self._in_memory,
            "streamed": lambda: self._streamed(sources),
        }

    def _in_memory(self):
        for k_pool, v_pool in self.pools:
            numba_attn.paged_attention(self.q, k_pool, v_pool, self.tables, self.lens)

    def _streamed(self, sources):
        for source, following in itertools.zip_longest(sources, sources[1:]):
            then = None if following is None else (following, self.tables, self.lens)
            self.streamer.attend(self.q, source, self.tables, self.lens, then=then)


class Files(Pools):
    """The same, and in a KV file."""

    def __init__(self, path, num_layers, num_blocks, streamer):
        rng = np.random.default_rng(0)
        sizes = {"block_size": BLOCK, "num_kv_heads": KV_HEADS, "head_dim": DIM}
        file = numba_attn.KVFile.create(path, num_layers=num_layers, num_blocks=num_blocks, **sizes)
        pools = []
        for layer in range(num_layers):
            pair = file.layer(layer).pair(num_blocks)
            for block in range(num_blocks):
                numbers = rng.standard_normal((2, BLOCK, KV_HEADS, DIM), np.float32)
                pair[:, block] = numbers.astype(ml_dtypes.bfloat16)
            file.write_blocks(layer, np.arange(num_blocks), *pair)
            pools.append(pair)
        file.sync()
        file.close()
        super().__init__(pools, streamer)
        self.path = path
        self.paths = [self.path / f"layer_{layer:04}.npy" for layer in range(num_layers)]

    def shuffled(self):
        """Return the same with the blocks of the table in another order."""
        other = copy.copy(self)
        other.tables = np.random.default_rng(1).permuted(self.tables, axis=1)
        return other

    def calls(self, drop, direct):
        """Return what is compared."""
        file = numba_attn.KVFile(self.path, direct=direct)
        sources = [file.layer(layer) for layer in range(len(self.pools))]

        def read():
            self._drop(drop)
            self._read(direct)

        def streamed():
            self._drop(drop)
            self._streamed(sources)

        return {"read": read, "memory": self._in_memory, "streamed": streamed}

    def _drop(self, drop):
        if drop:
            for path in self.paths:
                drop_from_cache(path)

    def _read(self, direct):
        memory = mmap.mmap(-1, PROBE_BYTES)  # at a page, as direct reads need it
        for path in self.paths:
            fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
            size, at = self.num_blocks * BLOCK_BYTES, HEADER
            while at < HEADER + size:
                at += os.preadv(fd, [memoryview(memory)[: HEADER + size - at]], at)
            os.close(fd)


class Link:
    """What stores are read through: it has a rate, and a queue, so that it need not be idle."""

    def __init__(self, seconds):
        self._seconds, self._lock, self._free_at = seconds, threading.Lock(), 0.0

    def transfer(self, num_blocks):
        """Return when so many blocks are here."""
        with self._lock:
            begin = max(self._free_at, time.perf_counter())
            end = self._free_at = begin + self._seconds * num_blocks
        time.sleep(max(0.0, end - time.perf_counter()))


class Paced(numba_attn.ArraySource):
    """A store behind a link."""

    def __init__(self, k_pool, v_pool, link):
        super().__init__(k_pool, v_pool)
        self._link = link

    def read(self, block_ids, k_out, v_out):
        """Wait; no number is copied."""
        self._link.transfer(len(block_ids))


if __name__ == "__main__":
    sys.exit(main())
