"""Attention over a KV cache larger than memory: tiles are read while others are absorbed."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent import futures
from typing import Any

from . import (
    _arrays,
    _device,
    _frameworks,
    _run,
    _stream_call,
    _stream_progress,
    _validate,
    _validate_options,
    _validate_state,
)
from ._stage_cpu import OnCpu
from ._stream_call import Call, Keys
from ._stream_job import Job, Stopped
from ._stream_progress import Report
from ._stream_workers import Workers, workers_of_this_thread
from ._tiles import Tiles
from ._types import Array
from .sources import ArraySource
from .state import AttentionState

_REPORT_SECONDS = 0.1


class Streamer:
    """Reads K/V blocks from a source and attends to them, tile by tile, in bounded memory.

    It keeps buffers and threads from call to call, as a model's layers and steps need them;
    `stream_attention` is one call. Every thread reads a tile into its buffer and absorbs it there,
    while the others do the same; states are folded in the order of the tiles.

    Parameters
    ----------
    resident_blocks : int
        Room for so many blocks, in all buffers together. Each has an equal part of it, rounded
        down: that is a tile.
    prefetch : int
        Tiles that are read while another is absorbed; so there are one more buffers and threads,
        as far as there are blocks.

    Raises
    ------
    ValueError, TypeError
        If a number is none, or too small.

    Notes
    -----
    Calls of several threads take turns. A tile of some megabytes is quick; from a store with a
    latency, larger ones are. With one buffer (`prefetch` 0, or one block) nothing overlaps.

    Examples
    --------
    >>> import numpy as np, numba_attn
    >>> rng = np.random.default_rng(0)
    >>> pools = rng.standard_normal((2, 2, 40, 16, 2, 64)).astype(np.float16)
    >>> layers = [numba_attn.ArraySource(*pair) for pair in pools]
    >>> tables, lens = rng.permutation(40)[None], np.array([629])
    >>> q = np.ones((1, 4, 64), np.float16)
    >>> with numba_attn.Streamer(resident_blocks=12) as streamer:
    ...     a = streamer.attend(q, layers[0], tables, lens, then=(layers[1], tables, lens))
    ...     b = streamer.attend(a, layers[1], tables, lens)
    >>> b.shape
    (1, 4, 64)
    """

    def __init__(self, resident_blocks: int, prefetch: int = 2) -> None:
        self.resident_blocks = _validate_state.whole("resident_blocks", resident_blocks, 1)
        self.prefetch = _validate_state.whole("prefetch", prefetch, 0)
        self._calls = threading.Lock()
        self._caller: int | None = None  # the thread that is in a call
        self._workers: Workers | None = None
        self._next: Job | None = None  # begun by `then`
        self._cut: tuple[Keys, Tiles] | None = None  # the last tiles; the next layer has the same

    @_frameworks.taking_arrays("q")
    @_device.streamed
    def attend(
        self,
        q: Array,
        source: Any,
        block_tables: Any,
        seq_lens: Any,
        *,
        state: AttentionState | None = None,
        then: tuple[Any, Any, Any] | None = None,
        tile_starts: Any = None,
        tile_token_counts: Any = None,
        scale: float | None = None,
        softcap: float | None = None,
        sliding_window: int | None = None,
        alibi_slopes: Any = None,
        sinks: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        causal: bool = True,
        query_start_loc: Any = None,
        seq_starts: Any = None,
        return_lse: bool = False,
        out: Array | None = None,
        device: str = "auto",
        kernel: str = "auto",
        stream: Any = None,
        progress: Any = None,
    ) -> Any:
        """Attend to keys and values that a source has; else as `paged_attention`.

        Parameters
        ----------
        q : [S, Hq, D], [S, Q, Hq, D] or [tokens, Hq, D]
            Queries.
        source : Source
            A layer of a `KVFile`, an `ArraySource`, or your own; see `numba_attn.Source`. Several
            threads read from it at a time.
        block_tables : int [S, max_blocks]
            Blocks of the source; those that several sequences share in a tile are read once.
        seq_lens : int [S]
            Tokens of each sequence, also those that are elsewhere.
        state : AttentionState, optional
            What was absorbed before, from elsewhere, of the same queries; it holds all in the end.
            The tables have the rest: `tile_token_counts` says how many tokens.
        then : (source, block_tables, seq_lens), optional
            What the next call will be given, with its other arguments as those of this one. Its
            first tiles are read as soon as buffers are free, so what they hold must have been
            written; what is written after is not seen. An error of such a read is the next call's.
        tile_starts, tile_token_counts : int [S], optional
            Where the tables have only a part of each sequence: the position of their first token,
            by default 0; and their tokens, by default those up to the end.
        scale, softcap, sliding_window, alibi_slopes, sinks : optional
            As in `paged_attention`.
        k_scale, v_scale, causal, query_start_loc, seq_starts : optional
            As in `paged_attention`.
        return_lse, out, device, kernel, stream : optional
            As in `paged_attention`.
        progress : bool or callable, optional
            True: a bar on stderr, with bytes, rate and time left (needs tqdm). Or a function, which
            is called with the bytes of K/V attended to so far, and in all.

        Returns
        -------
        out : [S, Hq, Dv], [S, Q, Hq, Dv] or [tokens, Hq, Dv]
            As from `paged_attention`; the same bits, if a tile of ``resident_blocks // (prefetch +
            1)`` blocks has room for a split (512 tokens on the CPU, 256 on CUDA) of a sequence.
        lse : float32 [S, Hq], [S, Q, Hq] or [tokens, Hq]
            Only with ``return_lse``.

        Raises
        ------
        ValueError, TypeError, RuntimeError
            As `paged_attention`.
        Exception
            Whatever the source raises; `state` and `out` are as they were, then.
        """
        same = {
            "tile_starts": tile_starts,
            "tile_token_counts": tile_token_counts,
            "scale": scale,
            "softcap": softcap,
            "sliding_window": sliding_window,
            "alibi_slopes": alibi_slopes,
            "causal": causal,
            "query_start_loc": query_start_loc,
            "seq_starts": seq_starts,
            "kernel": kernel,
        }
        scales = {"k_scale": k_scale, "v_scale": v_scale}
        given = _run.given_arrays(q=q, alibi_slopes=alibi_slopes, sinks=sinks, **scales)
        home = _device.home(**given, out=out)
        kind = _device.resolve(device, home)
        _validate_options.launch(kind, kernel, stream)
        _validate.flag("return_lse", return_lse)
        _stream_progress.check(progress)
        call = _stream_call.check(q, (source, block_tables, seq_lens), **same, **scales)
        inputs, sizes = call.inputs, call.inputs.sizes
        sinks = _validate_options.per_head("sinks", sinks, sizes.num_q_heads)
        shape = (*q.shape[:-1], sizes.v_head_dim)
        if out is not None:
            apart = _run.given_arrays(**given, state=getattr(state, "buffer", None))
            if isinstance(source, ArraySource):
                apart |= {"the source": source.k_pool, "the source's values": source.v_pool}
            _validate.out(out, shape, inputs.dtype, apart)
        next_keys = None if then is None else _stream_call.check_next(q, then, same)
        with self._alone():
            work = _run.copy_of(state, sizes, kind)
            if work.o.size:
                self._pass(call, next_keys, work, progress)
            if state is not None:
                _arrays.overwrite(state.buffer, work.buffer)
        return _run.finish(work, home, shape, inputs.dtype, sinks, return_lse, out)

    def close(self) -> None:
        """End the threads and free the buffers; a further call makes them anew."""
        with self._alone():
            self._end()

    def __enter__(self) -> Streamer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Wait for other threads' calls; what a call itself calls may not use the streamer."""
        workers = workers_of_this_thread()
        is_worker = workers is not None and workers is self._workers
        if is_worker or self._caller == threading.get_ident():
            raise RuntimeError(
                "Streamer: is in a call, which waits for what is asked of it here; use another one"
            )
        with self._calls:
            self._caller = threading.get_ident()
            try:
                yield
            finally:
                self._caller = None

    def _pass(
        self, call: Call, next_keys: Keys | None, state: AttentionState, progress: Any
    ) -> None:
        """Absorb all that a call asks for; begin to read the next one."""
        job = None
        try:
            workers, job = self._begin(call.keys, state.device)
            total = job.tiles.table_blocks * call.keys.layout.block_bytes
            with _stream_progress.reporting(progress, total) as report:
                job.start(_stage(call, state, workers.count))
                workers.work_on(job)
                if next_keys is not None and workers.fit(next_keys.layout, state.device):
                    self._next = workers.job(next_keys, self._tiles(next_keys, workers))
                    workers.work_on(self._next)
                _wait(job, report)
        except BaseException as error:
            if job is not None:
                job.stop(error)
            self._end()
            raise

    def _begin(self, keys: Keys, device: str) -> tuple[Workers, Job]:
        """Return workers, and the job for some keys: that of `then`, if it is this one."""
        begun, self._next = self._next, None
        workers = self._workers
        if workers is not None and workers.fit(keys.layout, device):
            if begun is None:
                return workers, workers.job(keys, self._tiles(keys, workers))
            if begun.keys.source is keys.source and begun.keys.are_cut_as(keys):
                return workers, begun
        self._next = begun
        self._end()
        count = min(self.prefetch + 1, self.resident_blocks)
        self._workers = Workers(keys.layout, device, count, self.resident_blocks // count)
        return self._workers, self._workers.job(keys, self._tiles(keys, self._workers))

    def _tiles(self, keys: Keys, workers: Workers) -> Tiles:
        """Return the tiles of some keys: the last ones, if they are these."""
        if self._cut is None or not self._cut[0].are_cut_as(keys) or not self._cut[1].reusable:
            self._cut = keys, keys.tiles(workers.most_blocks, workers.device)
        return self._cut[1]

    def _end(self) -> None:
        """Stop what was begun, and end the threads."""
        begun, self._next = self._next, None
        workers, self._workers = self._workers, None
        self._cut = None  # the device may be another
        if begun is not None:
            begun.stop(Stopped())
        if workers is not None:
            workers.end()


def _stage(call: Call, state: AttentionState, num_workers: int) -> Any:
    """Return what absorbs tiles on the device of a state."""
    if state.device == "cpu":
        return OnCpu(call, state, num_workers)
    from ._stage_cuda import OnCuda  # machines without CUDA do without

    return OnCuda(call, state)


def _wait(job: Job, report: Report | None) -> None:
    """Wait for the end of a job; raise its error."""
    block_bytes = job.keys.layout.block_bytes
    while futures.wait(job.futures, None if report is None else _REPORT_SECONDS).not_done:
        if report is not None:
            report(job.blocks_folded * block_bytes)
    if job.error is not None:
        raise job.error
    if report is not None:
        report(job.blocks_folded * block_bytes)


def stream_attention(
    q: Array,
    source: Any,
    block_tables: Any,
    seq_lens: Any,
    *,
    resident_blocks: int,
    prefetch: int = 2,
    return_lse: bool = False,
    progress: Any = None,
    **options: Any,
) -> Any:
    """Decode attention over a KV cache that is read from a source in bounded memory.

    Returns what `paged_attention` returns, whatever the context; at most `resident_blocks` blocks
    are in memory. One call of `Streamer.attend`, which says when the bits are the same, too.

    Parameters
    ----------
    q, source, block_tables, seq_lens : arrays and a source
        As in `Streamer.attend`.
    resident_blocks, prefetch : int
        As in `Streamer`.
    return_lse, progress : optional
        As in `Streamer.attend`.
    **options
        The other ones of `Streamer.attend`.

    Returns
    -------
    out : [S, Hq, Dv], [S, Q, Hq, Dv] or [tokens, Hq, Dv]
        As from `paged_attention`.
    lse : float32 [S, Hq], [S, Q, Hq] or [tokens, Hq]
        Only with ``return_lse``.

    Raises
    ------
    ValueError, TypeError, RuntimeError
        As `Streamer.attend`.

    Examples
    --------
    >>> import tempfile, numpy as np, numba_attn
    >>> folder = tempfile.mkdtemp() + "/cache"
    >>> sizes = {"num_blocks": 40, "block_size": 16, "num_kv_heads": 2, "head_dim": 64}
    >>> q, tables = np.ones((1, 4, 64), np.float16), np.arange(40)[None]
    >>> with numba_attn.KVFile.create(folder, num_layers=1, **sizes, dtype="float16") as file:
    ...     layer = file.layer(0)
    ...     numba_attn.stream_attention(q, layer, tables, [640], resident_blocks=6).shape
    (1, 4, 64)
    """
    with Streamer(resident_blocks, prefetch) as streamer:
        return streamer.attend(
            q,
            source,
            block_tables,
            seq_lens,
            return_lse=return_lse,
            progress=progress,
            **options,
        )
