"""The whole input contract and every message.

Each message gives the argument's name, the rule with its symbols and numbers, what came, and what
to do. Everything here runs before anything is written. ``ValueError`` is for shapes and values,
``TypeError`` for dtypes and kinds. The contents of device arrays are not read.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from . import _arrays, _device, _plan
from ._call import Options, Tile
from ._plan import Sizes
from ._types import Array, HostArray

_INT32_MAX = int(np.iinfo(np.int32).max)
_OVERLAP_WORK: Any = 10_000  # steps of numpy.shares_memory, which is exponential at worst


def axes(name: str, array: Array, letters: str, *counts: int) -> None:
    """Check the number of axes, one of `counts`."""
    if not hasattr(array, "shape"):
        raise TypeError(
            f"{name}: expected an array {letters}, got {type(array).__name__}; "
            "convert it with numpy.asarray"
        )
    if len(array.shape) not in counts:
        number = " or ".join(map(str, counts))
        raise ValueError(
            f"{name}: expected {number} axes {letters}, got shape {tuple(array.shape)}; reshape it"
        )


def rows(name: str, array: Array, letters: str, *counts: int) -> None:
    """Check the number of axes, that the last one is contiguous, and alignment."""
    axes(name, array, letters, *counts)
    shape = tuple(array.shape)  # that of a simulated device's array has no [-1]
    strided = 0 not in shape and shape[-1] > 1  # else strides mean nothing
    if strided and array.strides[-1] != array.dtype.itemsize:
        raise ValueError(
            f"{name}: the last axis of {letters} must be contiguous (stride {array.dtype.itemsize} "
            f"bytes), got strides {tuple(array.strides)}; copy it with numpy.ascontiguousarray"
        )
    if isinstance(array, np.ndarray) and not array.flags.aligned:
        raise ValueError(
            f"{name}: the data must be aligned to {array.dtype.itemsize} bytes, got an unaligned "
            "view; copy it with array.copy()"
        )


def _positive(name: str, letter: str, size: int, array: Array) -> None:
    if size < 1:
        raise ValueError(
            f"{name}: {letter} must be at least 1, got {letter} = {size} in shape "
            f"{tuple(array.shape)}; only S, N and tables may be empty"
        )


def attention_sizes(
    q: Array, k_pool: Array, v_pool: Array, query_starts: Array | None = None
) -> Sizes:
    """Check the shapes of q and the pools against each other.

    Parameters
    ----------
    q : [S, Hq, D], [S, Q, Hq, D], or with query_starts [rows, Hq, D]
    k_pool : [N, B, Hkv, D]
    v_pool : [N, B, Hkv, Dv]
    query_starts : [S + 1], optional
    """
    if query_starts is None:
        rows("q", q, "[S, Hq, D] or [S, Q, Hq, D]", 3, 4)
        num_queries = 1 if len(q.shape) == 3 else q.shape[1]
        num_seqs, num_rows = q.shape[0], q.shape[0] * num_queries
        _positive("q", "Q", num_queries, q)
    else:
        rows("q", q, "[tokens, Hq, D] (with query_start_loc)", 3)
        num_seqs, num_rows, num_queries = _ragged(query_starts, q.shape[0]), q.shape[0], 0
    rows("k_pool", k_pool, "[N, B, Hkv, D]", 4)
    rows("v_pool", v_pool, "[N, B, Hkv, Dv]", 4)
    num_q_heads, head_dim = tuple(q.shape)[-2:]
    num_blocks, block_size, num_kv_heads, k_dim = k_pool.shape
    _positive("q", "Hq", num_q_heads, q)
    _positive("q", "D", head_dim, q)
    _positive("k_pool", "B", block_size, k_pool)
    _positive("k_pool", "Hkv", num_kv_heads, k_pool)
    _positive("v_pool", "Dv", v_pool.shape[3], v_pool)
    if k_dim != head_dim:
        raise ValueError(
            f"k_pool: its last axis must be D = {head_dim}, the head_dim of q, got {k_dim} "
            f"(k_pool {tuple(k_pool.shape)}, q {tuple(q.shape)}); check the order of the axes"
        )
    if tuple(v_pool.shape[:3]) != tuple(k_pool.shape[:3]):
        raise ValueError(
            f"v_pool: its first three axes [N, B, Hkv] must be those of k_pool, "
            f"{tuple(k_pool.shape[:3])}, got {tuple(v_pool.shape[:3])}; a head-major pool is "
            "passed as a transposed view"
        )
    head_ratio("q", num_q_heads, num_kv_heads)
    batch, heads = (num_seqs, num_rows, num_queries), (num_q_heads, num_kv_heads)
    return Sizes(*batch, *heads, head_dim, v_pool.shape[3], num_blocks, block_size)


def _ragged(query_starts: Array, num_rows: int) -> int:
    """Check the rows of each sequence [S + 1]; return S."""
    if len(query_starts.shape) != 1 or query_starts.shape[0] < 1:
        raise ValueError(
            f"query_start_loc: expected shape [S + 1], got {tuple(query_starts.shape)}; pass where "
            "the queries of each sequence begin in q, and their number in all"
        )
    if isinstance(query_starts, np.ndarray):
        steps = np.diff(query_starts.astype(np.int64))
        ends = int(query_starts[0]), int(query_starts[-1])
        if ends != (0, num_rows) or (steps < 0).any():
            raise ValueError(
                f"query_start_loc: must rise from 0 to the {num_rows} rows of q, got "
                f"{query_starts.tolist()}; pass the running sum of the queries of each sequence"
            )
    return int(query_starts.shape[0]) - 1


def head_ratio(name: str, num_q_heads: int, num_kv_heads: int) -> None:
    """Check that every kv head serves as many query heads."""
    if num_q_heads % num_kv_heads:
        raise ValueError(
            f"{name}: Hq must be a multiple of Hkv, got Hq = {num_q_heads} and Hkv = "
            f"{num_kv_heads}; check the numbers of heads of q and k_pool"
        )


def per_sequence(name: str, array: Array, num_seqs: int) -> None:
    if tuple(array.shape) != (num_seqs,):
        raise ValueError(
            f"{name}: expected shape [S] = ({num_seqs},), one per sequence of q, "
            f"got {tuple(array.shape)}; pass one number for each sequence"
        )


def table(name: str, array: Array, num_seqs: int, columns: str) -> None:
    if len(array.shape) != 2 or array.shape[0] != num_seqs:
        raise ValueError(
            f"{name}: expected shape [S, {columns}] with S = {num_seqs}, a row per sequence of q, "
            f"got {tuple(array.shape)}; pass a row of block ids for each sequence"
        )


def _outside(values: HostArray, end: HostArray | int) -> HostArray:
    """Tell which integers are not in 0..end, exclusive; unsigned, negative ones are large."""
    if values.dtype == np.int32 and isinstance(end, int):  # the usual case, told quickly
        small: HostArray = values.view(np.uint32) >= end
        return small
    outside: HostArray = values.astype(np.int64).view(np.uint64) >= end
    return outside


def lengths(name: str, lens: HostArray, rule: str, most: int, advice: str) -> None:
    """Check that lengths lie in 0..most."""
    bad = _outside(lens, min(most, _INT32_MAX) + 1)
    if np.count_nonzero(bad):
        row = int(np.argmax(bad))
        raise ValueError(
            f"{name}: must be from 0 to {rule} = {most} (and fit int32), "
            f"got {int(lens[row])} in row {row}; {advice}"
        )


def lengths_within(name: str, lens: HostArray, rule: str, most: HostArray, advice: str) -> None:
    """Check that lengths lie in 0..most, row by row."""
    bad = _outside(lens, most.astype(np.uint64) + np.uint64(1))
    if np.count_nonzero(bad):
        row = int(np.argmax(bad))
        raise ValueError(
            f"{name}: must be from 0 to {rule} = {int(most[row])}, "
            f"got {int(lens[row])} in row {row}; {advice}"
        )


def block_ids(name: str, tile: Tile, options: Options, sizes: Sizes) -> None:
    """Check the ids of the blocks that hold attended tokens against the pool; no others are read.

    The arrays of the tile are on the host, and but for the table checked.
    """
    bad = _outside(tile.tables, min(sizes.num_blocks, _INT32_MAX + 1))
    if not np.count_nonzero(bad):
        return
    ranges = _plan.key_ranges(tile, options.sliding_window, options.causal)
    first, end = _plan.used_tokens(ranges, len(tile.token_counts))
    block_size = min(sizes.block_size, _INT32_MAX + 1)
    token = np.arange(tile.tables.shape[1]) * block_size  # the first of each entry
    bad &= (token < end[:, None]) & (token + block_size > first[:, None])
    if np.count_nonzero(bad):
        row, entry = divmod(int(np.argmax(bad)), tile.tables.shape[1])
        raise ValueError(
            f"{name}: ids in use must be from 0 to N - 1 = {sizes.num_blocks - 1} (and fit int32), "
            f"got {int(tile.tables[row, entry])} in row {row}, entry {entry} (tokens {first[row]} "
            f"to {end[row]} are in use); pass ids of blocks in k_pool, or a shorter length"
        )


def paged(sizes: Sizes, block_tables: Array, seq_lens: Array) -> None:
    """Check the shape of block tables [S, max_blocks], and lengths [S]."""
    table("block_tables", block_tables, sizes.num_seqs, "max_blocks")
    per_sequence("seq_lens", seq_lens, sizes.num_seqs)
    if isinstance(seq_lens, np.ndarray):
        capacity = block_tables.shape[1] * sizes.block_size
        advice = "a row of block_tables needs ceil(seq_len / B) entries"
        lengths("seq_lens", seq_lens, "max_blocks * B", capacity, advice)


def contiguous(sizes: Sizes, seq_lens: Array) -> None:
    """Check contiguous caches [S, capacity, Hkv, D], the meaning of ``block_tables=None``."""
    if sizes.num_blocks != sizes.num_seqs:
        raise ValueError(
            f"block_tables: None means contiguous caches, one block per sequence, so k_pool must "
            f"have N = S = {sizes.num_seqs} blocks, got N = {sizes.num_blocks}; "
            "pass block_tables for a paged pool"
        )
    per_sequence("seq_lens", seq_lens, sizes.num_seqs)
    if isinstance(seq_lens, np.ndarray):
        advice = "a contiguous cache holds B tokens of a sequence"
        lengths("seq_lens", seq_lens, "the capacity B", sizes.block_size, advice)


def tile(
    sizes: Sizes, tile_blocks: Array, tile_block_counts: Array, tile_token_counts: Array | None
) -> None:
    """Check one tile: the shape of ids [S, T], block counts [S], optional token counts [S]."""
    table("tile_blocks", tile_blocks, sizes.num_seqs, "T")
    per_sequence("tile_block_counts", tile_block_counts, sizes.num_seqs)
    if tile_token_counts is not None:
        per_sequence("tile_token_counts", tile_token_counts, sizes.num_seqs)
    if not isinstance(tile_block_counts, np.ndarray):
        return
    columns, advice = tile_blocks.shape[1], "tile_blocks needs a column for each block of a row"
    lengths("tile_block_counts", tile_block_counts, "the tile capacity T", columns, advice)
    # A block size beyond int32 counts as 2^31: a block of it holds more tokens than a row may have.
    tokens = tile_block_counts.astype(np.int64) * min(sizes.block_size, _INT32_MAX + 1)
    if tile_token_counts is not None:
        advice = "pass fewer tokens, or more blocks"
        lengths_within("tile_token_counts", tile_token_counts, "count * B", tokens, advice)
        tokens = tile_token_counts
    lengths("tile_block_counts", tokens, "the largest count * B", _INT32_MAX, "pass smaller tiles")


def flag(name: str, value: Any) -> None:
    """Check that an argument is True or False."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(
            f"{name}: expected True or False, got {type(value).__name__}; arrays are not filled "
            "through it"
        )


def known_dtype(name: str, dtype: Any, formats: tuple[str, ...]) -> np.dtype[Any]:
    """Return a dtype given as such (torch's, too), as a type or by name."""
    if type(dtype).__module__ == "torch":
        dtype = str(dtype).removeprefix("torch.")
    try:
        extended = isinstance(dtype, str) and dtype in _arrays.CARRIERS and not hasattr(np, dtype)
        found = _arrays.ml_dtype(dtype) if extended else np.dtype(dtype)
    except (TypeError, ValueError):
        found = None
    if found is None or dtype is None or _arrays.format_of(found) not in formats:
        came = repr(dtype) if found is None else found.name
        raise TypeError(
            f"{name}: expected {', '.join(formats)} or uint16 (bfloat16 bits), got {came}; "
            "convert with .astype"
        )
    return found


def out(array: Array, shape: tuple[int, ...], dtype: Any, inputs: dict[str, Array]) -> None:
    """Check a caller's output array: exact shape and dtype, writable, apart from the inputs."""
    on_host = not _device.is_device_array(array)
    if on_host and (not isinstance(array, np.ndarray) or isinstance(array, np.ma.MaskedArray)):
        raise TypeError(
            f"out: expected a NumPy array or a CUDA array, got {type(array).__name__}; "
            "allocate it with numpy.empty"
        )
    array = _device.own(array)
    if tuple(array.shape) != shape:
        raise ValueError(
            f"out: expected shape {shape}, that of q with Dv, got {tuple(array.shape)}; reshape it"
        )
    if array.dtype != dtype:
        raise TypeError(
            f"out: expected dtype {np.dtype(dtype).name}, that of the result, got {array.dtype}; "
            "allocate it with this dtype, or view it as such"
        )
    rows("out", array, "[..., Hq, Dv]", len(shape))
    if on_host:
        writable_apart("out", array, inputs)


def writable_apart(name: str, array: HostArray, inputs: dict[str, Array]) -> None:
    """Check that an array can be written without changing an input or itself."""
    if not array.flags.writeable:
        raise ValueError(f"{name}: must be writable, got a read-only array; pass a copy of it")
    if _overlaps_itself(array):
        raise ValueError(
            f"{name}: its elements must lie apart, got strides {array.strides} for shape "
            f"{array.shape}; pass an array of its own instead of a broadcast view"
        )
    for other, given in inputs.items():
        if isinstance(given, np.ndarray) and overlap(array, given):
            raise ValueError(
                f"{name}: must not overlap {other}, got a view of its memory; pass an array of "
                "its own"
            )


def overlap(one: Array, two: Array) -> bool:
    """Tell whether two host arrays share an element; True also where that is too hard to say."""
    if not (isinstance(one, np.ndarray) and isinstance(two, np.ndarray)):
        return False
    try:
        return bool(np.shares_memory(one, two, max_work=_OVERLAP_WORK))
    except getattr(np, "exceptions", np).TooHardError:  # in np itself before NumPy 1.25
        return True


def _overlaps_itself(array: HostArray) -> bool:
    """Tell whether elements may lie on one another, as in a broadcast view."""
    if array.flags.c_contiguous:  # the usual case, told quickly
        return False
    end = 0  # of the memory spanned by the axes of smaller stride
    for stride, size in sorted(zip(map(abs, array.strides), array.shape, strict=True)):
        if size > 1 and array.size:
            if stride < end + array.itemsize:
                return True
            end += stride * (size - 1)
    return False
