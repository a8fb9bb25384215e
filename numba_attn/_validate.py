"""The whole input contract and every message.

Each message gives the argument's name, the rule with its symbols and numbers, what came, and what
to do. Everything here runs before anything is written. ``ValueError`` is for shapes and values,
``TypeError`` for dtypes and kinds. The contents of device arrays are not read.
"""

from __future__ import annotations

import math
import numbers
from typing import Any

import numpy as np

from ._plan import Sizes
from ._types import Array, HostArray

_INT32_MAX = int(np.iinfo(np.int32).max)


def axes(name: str, array: Array, letters: str, count: int) -> None:
    """Check the number of axes."""
    if not hasattr(array, "shape"):
        raise TypeError(f"{name}: expected an array {letters}, got {type(array).__name__}")
    if len(array.shape) != count:
        raise ValueError(
            f"{name}: expected {count} axes {letters}, got shape {tuple(array.shape)}; reshape it"
        )


def _rows(name: str, array: Array, letters: str, count: int) -> None:
    """Check the number of axes, that the last one is contiguous, and alignment."""
    axes(name, array, letters, count)
    if array.shape[-1] > 1 and array.strides[-1] != array.dtype.itemsize:
        raise ValueError(
            f"{name}: the last axis of {letters} must be contiguous (stride {array.dtype.itemsize} "
            f"bytes), got strides {tuple(array.strides)}; copy it with numpy.ascontiguousarray"
        )
    if isinstance(array, np.ndarray) and not array.flags.aligned:
        raise ValueError(
            f"{name}: the data must be aligned to {array.dtype.itemsize} bytes, got an unaligned "
            "view; copy it with numpy.ascontiguousarray"
        )


def _positive(name: str, letter: str, size: int) -> None:
    if size < 1:
        raise ValueError(f"{name}: {letter} must be at least 1, got {letter} = {size}")


def attention_sizes(q: Array, k_pool: Array, v_pool: Array) -> Sizes:
    """Check the shapes of q and the pools against each other.

    Parameters
    ----------
    q : uint16 [S, Hq, D]
    k_pool : uint16 [N, B, Hkv, D]
    v_pool : uint16 [N, B, Hkv, Dv]
    """
    _rows("q", q, "[S, Hq, D]", 3)
    _rows("k_pool", k_pool, "[N, B, Hkv, D]", 4)
    _rows("v_pool", v_pool, "[N, B, Hkv, Dv]", 4)
    num_seqs, num_q_heads, head_dim = q.shape
    num_blocks, block_size, num_kv_heads, k_dim = k_pool.shape
    _positive("q", "Hq", num_q_heads)
    _positive("q", "D", head_dim)
    _positive("k_pool", "B", block_size)
    _positive("k_pool", "Hkv", num_kv_heads)
    _positive("v_pool", "Dv", v_pool.shape[3])
    if k_dim != head_dim:
        raise ValueError(
            f"k_pool: its last axis must be D = {head_dim}, the head_dim of q, got {k_dim} "
            f"(k_pool {tuple(k_pool.shape)}, q {tuple(q.shape)})"
        )
    if tuple(v_pool.shape[:3]) != tuple(k_pool.shape[:3]):
        raise ValueError(
            f"v_pool: its first three axes [N, B, Hkv] must be those of k_pool, "
            f"{tuple(k_pool.shape[:3])}, got {tuple(v_pool.shape[:3])}; a head-major pool is "
            "passed as a transposed view"
        )
    if num_q_heads % num_kv_heads:
        raise ValueError(
            f"q: Hq must be a multiple of Hkv, got Hq = {num_q_heads} and Hkv = {num_kv_heads}; "
            "check the head axes of q and k_pool"
        )
    return Sizes(
        num_seqs, num_q_heads, num_kv_heads, head_dim, v_pool.shape[3], num_blocks, block_size
    )


def softmax_scale(scale: Any, head_dim: int) -> float:
    """Return the scale, by default 1 / sqrt(D)."""
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    if isinstance(scale, bool) or not isinstance(scale, (numbers.Real, np.floating)):
        raise TypeError(f"scale: expected a real number or None, got {type(scale).__name__}")
    value = float(scale)
    if not (0.0 < value < math.inf):
        raise ValueError(f"scale: must be positive and finite, got {value}")
    return value


def _per_sequence(name: str, array: Array, num_seqs: int) -> None:
    if tuple(array.shape) != (num_seqs,):
        raise ValueError(
            f"{name}: expected shape [S] = ({num_seqs},), one per sequence of q, "
            f"got {tuple(array.shape)}"
        )


def _table(name: str, array: Array, num_seqs: int, columns: str) -> None:
    if len(array.shape) != 2 or array.shape[0] != num_seqs:
        raise ValueError(
            f"{name}: expected shape [S, {columns}] with S = {num_seqs}, a row per sequence of q, "
            f"got {tuple(array.shape)}"
        )


def _lengths(name: str, lens: HostArray, capacity: int, rule: str) -> None:
    """Check that lengths lie in 0..capacity."""
    limit = min(capacity, _INT32_MAX)
    bad = (lens < 0) | (lens > limit)
    if bad.any():
        row = int(np.argmax(bad))
        raise ValueError(
            f"{name}: entries must be from 0 to {rule} = {capacity} (and fit int32), "
            f"got {int(lens[row])} in row {row}"
        )


def _block_ids(name: str, table: HostArray, used: HostArray, num_blocks: int) -> None:
    """Check the first `used` ids of each row against the pool; the others are never read."""
    valid = np.arange(table.shape[1]) < used[:, None]
    bad = valid & ((table < 0) | (table >= num_blocks))
    if bad.any():
        row, column = (int(i) for i in np.unravel_index(int(np.argmax(bad)), bad.shape))
        raise ValueError(
            f"{name}: block ids must be from 0 to N - 1 = {num_blocks - 1} in a row's first "
            f"{int(used[row])} entries (those in use), got {int(table[row, column])} in row {row}, "
            f"entry {column}"
        )


def paged(sizes: Sizes, block_tables: Array, seq_lens: Array) -> None:
    """Check block tables [S, max_blocks] and lengths [S] against the pool."""
    _table("block_tables", block_tables, sizes.num_seqs, "max_blocks")
    _per_sequence("seq_lens", seq_lens, sizes.num_seqs)
    if not isinstance(seq_lens, np.ndarray):
        return
    capacity = block_tables.shape[1] * sizes.block_size
    _lengths("seq_lens", seq_lens, capacity, "max_blocks * B")
    used = -(-seq_lens.astype(np.int64) // sizes.block_size)
    _block_ids("block_tables", block_tables, used, sizes.num_blocks)


def contiguous(sizes: Sizes, seq_lens: Array) -> None:
    """Check contiguous caches [S, capacity, Hkv, D], the meaning of ``block_tables=None``."""
    if sizes.num_blocks != sizes.num_seqs:
        raise ValueError(
            f"block_tables: None means contiguous caches, one block per sequence, so k_pool must "
            f"have N = S = {sizes.num_seqs} blocks, got N = {sizes.num_blocks}; "
            "pass block_tables for a paged pool"
        )
    _per_sequence("seq_lens", seq_lens, sizes.num_seqs)
    if isinstance(seq_lens, np.ndarray):
        _lengths("seq_lens", seq_lens, sizes.block_size, "the capacity B")


def tile(
    sizes: Sizes, tile_blocks: Array, tile_block_counts: Array, tile_token_counts: Array | None
) -> None:
    """Check one tile: ids [S, T], block counts [S] and optional token counts [S]."""
    _table("tile_blocks", tile_blocks, sizes.num_seqs, "T")
    _per_sequence("tile_block_counts", tile_block_counts, sizes.num_seqs)
    if tile_token_counts is not None:
        _per_sequence("tile_token_counts", tile_token_counts, sizes.num_seqs)
    if not isinstance(tile_block_counts, np.ndarray):
        return
    _lengths("tile_block_counts", tile_block_counts, tile_blocks.shape[1], "the tile capacity T")
    used = tile_block_counts.astype(np.int64)
    capacity = used * sizes.block_size
    name = "tile_block_counts" if tile_token_counts is None else "tile_token_counts"
    tokens = capacity if tile_token_counts is None else tile_token_counts
    bad = (tokens < 0) | (tokens > np.minimum(capacity, _INT32_MAX))
    if bad.any():
        row = int(np.argmax(bad))
        raise ValueError(
            f"{name}: tokens must be from 0 to count * B = {int(capacity[row])} (and fit int32), "
            f"got {int(tokens[row])} in row {row}"
        )
    used = -(-tokens.astype(np.int64) // sizes.block_size)
    _block_ids("tile_blocks", tile_blocks, used, sizes.num_blocks)


def state_sizes(num_seqs: Any, num_q_heads: Any, head_dim: Any) -> None:
    """Check the sizes of a new state."""
    named = {"num_seqs": num_seqs, "num_q_heads": num_q_heads, "head_dim": head_dim}
    for name, size in named.items():
        if isinstance(size, bool) or not isinstance(size, numbers.Integral):
            raise TypeError(f"{name}: expected an integer, got {type(size).__name__}")
        least = 0 if name == "num_seqs" else 1
        if size < least:
            raise ValueError(f"{name}: must be at least {least}, got {size}")


def is_state(name: str, state: Any, kind: type) -> None:
    """Check that an argument is a state."""
    if not isinstance(state, kind):
        raise TypeError(f"{name}: expected an AttentionState, got {type(state).__name__}")


def output_dtype(dtype: Any, supported: tuple[np.dtype[Any], ...]) -> np.dtype[Any]:
    """Return the output dtype as a dtype."""
    found: np.dtype[Any] = np.dtype(dtype)
    if found not in supported:
        names = ", ".join(one.name for one in supported)
        raise TypeError(f"dtype: expected one of {names}, got {found.name}")
    return found


def state_fits(state: Any, sizes: Sizes) -> None:
    """Check a state [S, Hq, Dv] against q and v_pool."""
    expected = (sizes.num_seqs, sizes.num_q_heads, sizes.v_head_dim)
    if tuple(state.o.shape) != expected:
        raise ValueError(
            f"state: expected [S, Hq, Dv] = {expected} from q and v_pool, got "
            f"{tuple(state.o.shape)}; make one with AttentionState.like(q, v_pool)"
        )


def states_merge(state: Any, other: Any) -> None:
    """Check that two states can be merged."""
    if state is other or (
        isinstance(state.buffer, np.ndarray)
        and isinstance(other.buffer, np.ndarray)
        and np.may_share_memory(state.buffer, other.buffer)
    ):
        raise ValueError("other: a state cannot be merged with itself (its keys would count twice)")
    if state.device != other.device:
        raise ValueError(
            f"other: both states must be on one device, got {state.device!r} and {other.device!r}"
        )
    if tuple(state.o.shape) != tuple(other.o.shape):
        raise ValueError(
            f"other: expected [S, Hq, Dv] = {tuple(state.o.shape)} as in state, "
            f"got {tuple(other.o.shape)}"
        )


def out(array: Array, shape: tuple[int, ...], dtype: Any, inputs: dict[str, Array]) -> None:
    """Check a caller's output array: exact shape and dtype, writable, apart from the inputs."""
    if tuple(array.shape) != shape:
        raise ValueError(f"out: expected shape [S, Hq, Dv] = {shape}, got {tuple(array.shape)}")
    if array.dtype != dtype:
        raise TypeError(f"out: expected dtype {np.dtype(dtype).name}, got {array.dtype}")
    _rows("out", array, "[S, Hq, Dv]", 3)
    if not isinstance(array, np.ndarray):
        return
    if not array.flags.writeable:
        raise ValueError("out: must be writable, got a read-only array; pass a copy")
    for name, given in inputs.items():
        if isinstance(given, np.ndarray) and np.shares_memory(array, given):
            raise ValueError(f"out: must not overlap {name}; pass an array of its own")
