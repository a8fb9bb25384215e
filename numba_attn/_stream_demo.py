"""Attention over a KV cache larger than memory: ``python -m numba_attn stream``.

It limits this process's memory, writes one layer to disk, attends to it under the limit, and checks
some of the heads against float64.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import pathlib
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

from . import _arguments, _machine, _memory, _stream_check
from ._check import Check
from ._plan import ceil_div
from ._progress import Progress
from ._types import HostArray, LongArray
from ._workloads import BLOCK_SIZE, fill, normal
from .kv_file import KVFile, KVLayer
from .streamer import stream_attention

_MIB = 1 << 20
_RESIDENT_BYTES = 64 * _MIB  # by default
_ALLOWANCE = 256 * _MIB  # for what is neither K nor V
_PIECE_BYTES = 4 * _MIB  # written, or read by the probe, at a time
_CHECKED_HEADS = 4


@dataclasses.dataclass(frozen=True)
class Case:
    """One sequence in one layer, and how it is read."""

    context: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    resident_blocks: int
    prefetch: int

    @property
    def num_blocks(self) -> int:
        """Blocks of the file."""
        return ceil_div(self.context, BLOCK_SIZE)

    @property
    def file_bytes(self) -> int:
        """Bytes of K and V in the file."""
        return self.num_blocks * block_bytes(self.num_kv_heads, self.head_dim)

    @property
    def resident_bytes(self) -> int:
        """Bytes of the blocks in memory."""
        return self.resident_blocks * block_bytes(self.num_kv_heads, self.head_dim)


def block_bytes(num_kv_heads: int, head_dim: int) -> int:
    """Return the bytes of a block, K and V, in bfloat16."""
    return 2 * BLOCK_SIZE * num_kv_heads * head_dim * 2


def main(arguments: list[str]) -> int:
    """Run the command; return its exit status: 1 when the check fails, 130 when interrupted.

    Bad arguments end it with status 2.
    """
    options = _parse(arguments)
    try:
        with _folder(options.dir, options.keep) as folder:
            return _run(options.case, folder)
    except KeyboardInterrupt:
        print("\ninterrupted; the file is removed", file=sys.stderr)
        return 130


def _parse(arguments: list[str]) -> argparse.Namespace:
    """Parse and check the command line; say what is wrong and exit with 2 where it is bad."""
    parser = argparse.ArgumentParser(
        prog="python -m numba_attn stream",
        description="Limit this process's memory, write a KV cache that does not fit, attend to it "
        "from disk, and check the result against float64.",
    )
    parser.add_argument("--dir", type=pathlib.Path, required=True, help="where to write the cache")
    parser.add_argument(
        "--context",
        type=_arguments.token_count,
        default="1M",
        metavar="N",
        help="tokens, such as 20000, 128K or 1M (default 1M: 4 GiB with the default heads)",
    )
    parser.add_argument(
        "--heads",
        type=_arguments.heads,
        default="32/8",
        metavar="Hq/Hkv",
        help="query and kv heads (default 32/8)",
    )
    parser.add_argument(
        "--head-dim", type=_arguments.whole(1), default="128", metavar="D", help="(default 128)"
    )
    parser.add_argument(
        "--resident-blocks",
        type=_arguments.whole(1),
        metavar="N",
        help=f"blocks of {BLOCK_SIZE} tokens in memory (default: those of 64 MiB)",
    )
    parser.add_argument(
        "--prefetch",
        type=_arguments.whole(0),
        default="2",
        metavar="N",
        help="tiles that are read while one is absorbed (default 2)",
    )
    parser.add_argument("--keep", action="store_true", help="leave the cache there, and say where")
    options = parser.parse_args(arguments)
    if not options.dir.is_dir():
        parser.error(f"argument --dir: no folder {str(options.dir)!r}; create it first")
    options.case = _case(options)
    free = shutil.disk_usage(options.dir).free
    if options.case.file_bytes > free:
        parser.error(
            f"argument --dir: {_size(options.case.file_bytes)} are needed, {_size(free)} are free "
            f"in {str(options.dir)!r}; give another folder, or a shorter --context"
        )
    return options


def _case(options: argparse.Namespace) -> Case:
    num_q_heads, num_kv_heads = options.heads
    fitting = _RESIDENT_BYTES // block_bytes(num_kv_heads, options.head_dim)
    resident = options.resident_blocks or max(options.prefetch + 1, fitting)
    return Case(
        options.context, num_q_heads, num_kv_heads, options.head_dim, resident, options.prefetch
    )


@contextlib.contextmanager
def _folder(parent: pathlib.Path, keep: bool) -> Iterator[pathlib.Path]:
    """Make a folder, and remove it at the end; an error or an interrupt removes it in any case."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="numba_attn_", dir=parent))
    kept = False
    try:
        yield folder
        kept = keep
        if keep:
            print(f"kept in {folder}")
    finally:
        if not kept:
            shutil.rmtree(folder)


def _run(case: Case, folder: pathlib.Path) -> int:
    progress = Progress()
    print(", ".join(f"{name} {version}" for name, version in _machine.versions().items()))
    print(f"CPU: {_machine.cpu_name()}")
    progress.say("compiling")
    _warm_up(case)
    with _memory.limited(case.resident_bytes + _ALLOWANCE) as limit:
        _say(progress, _limit_line(case, limit))
        with _written(case, folder / "cache", progress) as file:
            return _stream(case, file.layer(0), progress)


def _warm_up(case: Case) -> None:
    """Compile, and start as many threads as there will be: what they take is no part of the room.

    Some tiles of the same size do it, of zeros.
    """
    few = 2 * case.resident_blocks * BLOCK_SIZE
    small = dataclasses.replace(case, context=min(few, case.context))
    _attend(small, _Zeros(case), _query(small), lambda done, total: None)


class _Zeros:
    """A source without a file."""

    block_size, dtype = BLOCK_SIZE, ml_dtypes.bfloat16

    def __init__(self, case: Case) -> None:
        self.num_kv_heads, self.head_dim = case.num_kv_heads, case.head_dim

    def read(self, block_ids: LongArray, k_out: HostArray, v_out: HostArray) -> None:
        k_out[:], v_out[:] = 0, 0


def _limit_line(case: Case, limit: int | None) -> str:
    size, blocks = _size(case.file_bytes), f"{_size(case.resident_bytes)} of them for blocks"
    taken = _memory.addresses()
    if limit is None or taken is None:
        return f"memory: no limit, this system cannot set one; a cache of {size}"
    line = (
        f"memory limit: {_size(limit)} of addresses, {_size(taken)} taken, {_size(limit - taken)} "
        f"left, {blocks}; the cache of {size} is "
    )
    if case.file_bytes > limit:
        return line + "larger than the limit"
    if case.file_bytes > limit - taken:
        return line + "not larger than the limit, only than what is left"
    return line + "not larger than what is left: a longer --context shows more"


@contextlib.contextmanager
def _written(case: Case, path: pathlib.Path, progress: Progress) -> Iterator[KVFile]:
    """Write the cache: N(0, 1) numbers, the same ones each time."""
    begin = time.perf_counter()
    with KVFile.create(
        path,
        num_layers=1,
        num_blocks=case.num_blocks,
        block_size=BLOCK_SIZE,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim,
    ) as file:
        rng = np.random.default_rng(0)
        sample = normal(rng, (1 << 20,))
        layer = file.layer(0)
        batch = max(1, _PIECE_BYTES // block_bytes(case.num_kv_heads, case.head_dim))
        pools = layer.pair(batch)  # [2, n, B, Hkv, D]
        for first in range(0, case.num_blocks, batch):
            progress.say(f"writing {_size(case.file_bytes)}", first / case.num_blocks)
            ids = np.arange(first, min(first + batch, case.num_blocks))
            fill(rng, sample, pools.swapaxes(0, 1))
            file.write_blocks(0, ids, *pools[:, : len(ids)])
        file.sync()
        _say(progress, _rate_line("written", case, time.perf_counter() - begin))
        yield file


def _stream(case: Case, layer: KVLayer, progress: Progress) -> int:
    """Attend to the file between two plain reads of it, and check the result."""
    q = _query(case)
    before = _read_plainly(layer.path, progress)
    dropped = drop_from_cache(layer.path)
    begin = time.perf_counter()
    out, lse = _attend(case, layer, q, lambda done, total: progress.say("attending", done / total))
    seconds = time.perf_counter() - begin
    after = _read_plainly(layer.path, progress)
    _say(progress, _rate_line("read before", case, before))
    print(_rate_line("attention", case, seconds))
    print(_rate_line("read after", case, after))
    print(f"before each, the file was {'' if dropped else 'not '}dropped from the page cache")
    checks = _check(case, layer, q, (out, lse), progress)
    print(_memory_line(case), end="\n\n")
    failed = not all(check.ok for check in checks)
    print(_FAILURE if failed else _summary(case, seconds, min(before, after)))
    return 1 if failed else 0


_FAILURE = "The check failed: what was attended to on disk is wrong."


def _query(case: Case) -> HostArray:
    """Return a query [1, Hq, D] in float32: its result is not rounded to less, errors show."""
    shape = 1, case.num_q_heads, case.head_dim
    return np.random.default_rng(1).standard_normal(shape, dtype=np.float32)


def _attend(case: Case, source: Any, q: HostArray, progress: Any) -> tuple[HostArray, HostArray]:
    """Attend to all tokens of a source; return out [1, Hq, D] and lse [1, Hq]."""
    out, lse = stream_attention(
        q,
        source,
        np.arange(case.num_blocks)[None],
        [case.context],
        resident_blocks=case.resident_blocks,
        prefetch=case.prefetch,
        return_lse=True,
        progress=progress,
    )
    return out, lse


def _read_plainly(path: pathlib.Path, progress: Progress) -> float:
    """Read a file from end to end into one buffer; return the seconds."""
    drop_from_cache(path)
    buffer = bytearray(_PIECE_BYTES)
    with open(path, "rb", buffering=0) as file:
        size, at = os.fstat(file.fileno()).st_size, 0
        begin = time.perf_counter()
        while at < size:
            at += os.preadv(file.fileno(), [buffer], at)
            progress.say("reading plainly", at / size)
        return time.perf_counter() - begin


def drop_from_cache(path: pathlib.Path) -> bool:
    """Let the system forget what it holds of a file that is on the disk; tell whether it can."""
    if not hasattr(os, "posix_fadvise"):
        return False
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return True


def _check(
    case: Case,
    layer: KVLayer,
    q: HostArray,
    answer: tuple[HostArray, HostArray],
    progress: Progress,
) -> list[Check]:
    """Compare some heads, the first and the last among them, with float64; print it."""
    spread = np.linspace(0, case.num_q_heads - 1, _CHECKED_HEADS)
    heads = sorted({int(head) for head in spread})
    checks = _stream_check.check(
        layer.path,
        case.context,
        q[0],
        answer[0][0],
        answer[1][0],
        heads=heads,
        on_progress=lambda fraction: progress.say("checking against float64", fraction),
    )
    _say(progress, f"heads {', '.join(map(str, heads))} of {case.num_q_heads} against float64:")
    for check in checks:
        print(f"  {check}")
    return checks


def _memory_line(case: Case) -> str:
    peak = _memory.peak()
    return (
        f"room in memory: {case.resident_blocks} of {case.num_blocks} blocks, "
        f"{_size(case.resident_bytes)}; most memory resident in this process: "
        f"{'not told' if peak is None else _size(peak)}"
    )


def _summary(case: Case, seconds: float, plain: float) -> str:
    resident = min(1.0, case.resident_bytes / case.file_bytes)
    return (
        f"Attention over {case.context} tokens on disk reads K/V at "
        f"{case.file_bytes / seconds / 1e9:.2f} GB/s, {plain / seconds:.0%} of the faster plain "
        f"read (by one thread), with {resident:.1%} of the cache in memory."
    )


def _rate_line(name: str, case: Case, seconds: float) -> str:
    return f"{name:10} {seconds:8.3f} s {case.file_bytes / seconds / 1e9:7.2f} GB/s"


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / _MIB:.1f} MiB"


def _say(progress: Progress, line: str) -> None:
    progress.clear()
    print(line, flush=True)
