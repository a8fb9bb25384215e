"""Where K/V blocks come from: anything that can read some of them into arrays."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np

from . import _arrays, _buffers, _device, _frameworks, _plan, _validate, _validate_state
from ._types import Array, HostArray, LongArray


class Source(Protocol):
    """What `stream_attention` reads from: sizes, and one method.

    It may also have `num_blocks` (ids are checked against it before anything is read), and
    `v_head_dim` and `v_dtype` where they differ from those of K.

    Examples
    --------
    >>> import numpy as np, numba_attn
    >>> class Ones:
    ...     block_size, num_kv_heads, head_dim, dtype = 16, 2, 64, np.dtype("float16")
    ...
    ...     def read(self, block_ids, k_out, v_out):
    ...         k_out[:], v_out[:] = 1, block_ids[:, None, None, None]
    >>> q = np.ones((1, 4, 64), np.float16)
    >>> out = numba_attn.stream_attention(q, Ones(), [[3, 5]], [32], resident_blocks=1)
    >>> out[0, :, 0].tolist()
    [4.0, 4.0, 4.0, 4.0]
    """

    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: Any

    def read(self, block_ids: LongArray, k_out: HostArray, v_out: HostArray) -> int | None:
        """Read blocks.

        Several threads may call it at a time, each with arrays of its own.

        Parameters
        ----------
        block_ids : int64 [n]
            Ascending, each once; read-only.
        k_out, v_out : [n, B, Hkv, D], [n, B, Hkv, Dv]
            To be filled; a block's keys lie before its values, in one piece.

        Returns
        -------
        int or None
            How many blocks were read; fewer than n is an error. None: all.
        """


class ArraySource:
    """Pools in memory, or mapped (`numpy.memmap`), as a source; they are not copied.

    Parameters
    ----------
    k_pool, v_pool : [N, B, Hkv, D], [N, B, Hkv, Dv]
        As in `paged_attention`.

    Raises
    ------
    ValueError, TypeError
        For shapes and dtypes that `paged_attention` does not take.

    Examples
    --------
    >>> import numpy as np, numba_attn
    >>> pools = np.zeros((2, 10, 16, 2, 64), np.float16)
    >>> source = numba_attn.ArraySource(*pools)
    >>> q, tables = np.ones((1, 4, 64), np.float16), np.array([[7, 2, 5]])
    >>> numba_attn.stream_attention(q, source, tables, [40], resident_blocks=2).shape
    (1, 4, 64)
    """

    def __init__(self, k_pool: Array, v_pool: Array) -> None:
        k_pool, v_pool = _frameworks.kept("k_pool", k_pool), _frameworks.kept("v_pool", v_pool)
        pools = []
        for name, pool in (("k_pool", k_pool), ("v_pool", v_pool)):
            if _device.is_device_array(pool):
                raise TypeError(
                    f"{name}: expected a NumPy array, got a CUDA array; pass it to paged_attention"
                )
            pools.append(_arrays.carried(name, pool, _arrays.POOL_FORMATS)[0])
            _validate.axes(name, pool, "[N, B, Hkv, D]", 4)
        if k_pool.shape[:3] != v_pool.shape[:3]:
            raise ValueError(
                f"v_pool: its first three axes [N, B, Hkv] must be those of k_pool, "
                f"{k_pool.shape[:3]}, got {v_pool.shape[:3]}; a head-major pool is passed as a "
                "transposed view"
            )
        self.k_pool, self.v_pool = k_pool, v_pool
        self._pools = tuple(pools)  # their carriers
        self.num_blocks, self.block_size, self.num_kv_heads, self.head_dim = k_pool.shape
        self.v_head_dim: int = v_pool.shape[3]
        self.dtype, self.v_dtype = k_pool.dtype, v_pool.dtype

    def read(self, block_ids: LongArray, k_out: HostArray, v_out: HostArray) -> None:
        """Copy blocks.

        Parameters
        ----------
        block_ids : int64 [n]
            Ascending, each once.
        k_out, v_out : [n, B, Hkv, D], [n, B, Hkv, Dv]
            To be filled.
        """
        outs = _arrays.as_carrier(k_out), _arrays.as_carrier(v_out)
        for block, (places,) in _buffers.runs(block_ids, len(block_ids)):
            for pool, out in zip(self._pools, outs, strict=True):
                out[places.start : places.stop] = pool[block : block + len(places)]


class Layout(NamedTuple):
    """How the blocks of a source lie in a buffer: K, then V, block after block."""

    block_size: int  # B
    num_kv_heads: int  # Hkv
    head_dim: int  # D
    v_head_dim: int  # Dv
    dtype: np.dtype[Any]
    v_dtype: np.dtype[Any]

    @classmethod
    def of(cls, source: Any) -> Layout:
        """Check a source, and return the layout of its blocks."""
        needed = ("block_size", "num_kv_heads", "head_dim", "dtype", "read")
        missing = [name for name in needed if not hasattr(source, name)]
        if missing:
            raise TypeError(
                f"source: expected block_size, num_kv_heads, head_dim, dtype and read(block_ids, "
                f"k_out, v_out), got {type(source).__name__} without {', '.join(missing)}; arrays "
                "are wrapped by ArraySource(k_pool, v_pool)"
            )
        block_size, heads, dim, v_dim = _validate_state.positive_sizes(
            **{f"source.{name}": getattr(source, name) for name in needed[:3]},
            **{"source.v_head_dim": getattr(source, "v_head_dim", source.head_dim)},
        )
        v_dtype = getattr(source, "v_dtype", source.dtype)
        return cls(
            block_size,
            heads,
            dim,
            v_dim,
            dtype=_validate.known_dtype("source.dtype", source.dtype, _arrays.POOL_FORMATS),
            v_dtype=_validate.known_dtype("source.v_dtype", v_dtype, _arrays.POOL_FORMATS),
        )

    def carried(self) -> Layout:
        """Return it with the dtypes that kernels see."""
        dtypes = (_arrays.CARRIERS[_arrays.format_of(x) or ""] for x in (self.dtype, self.v_dtype))
        return Layout(*self[:4], *dtypes)

    @property
    def _k_bytes(self) -> int:
        size = self.block_size * self.num_kv_heads * self.head_dim * self.dtype.itemsize
        return _plan.ceil_div(size, self.v_dtype.itemsize) * self.v_dtype.itemsize

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, K and V."""
        v_bytes = self.block_size * self.num_kv_heads * self.v_head_dim * self.v_dtype.itemsize
        step = max(self.dtype.itemsize, self.v_dtype.itemsize)
        return _plan.ceil_div(self._k_bytes + v_bytes, step) * step

    def pools(self, memory: Array) -> tuple[Array, Array]:
        """View bytes, on the host or a device, as pools [n, B, Hkv, D] and [n, B, Hkv, Dv]."""
        num_blocks = memory.size // self.block_bytes
        pools = []
        for offset, dim, dtype in (
            (0, self.head_dim, self.dtype),
            (self._k_bytes, self.v_head_dim, self.v_dtype),
        ):
            shape = num_blocks, self.block_size, self.num_kv_heads, dim
            row = dim * dtype.itemsize
            strides = self.block_bytes, self.num_kv_heads * row, row, dtype.itemsize
            if num_blocks:
                pools.append(_arrays.view_bytes(memory, shape, dtype, offset, strides))
            else:
                pools.append(np.empty(shape, dtype))
        return pools[0], pools[1]
