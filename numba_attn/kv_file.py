"""A KV cache on disk, read and written block by block."""

from __future__ import annotations

import json
import math
import operator
import os
import pathlib
import zlib
from typing import Any, NamedTuple

import numpy as np

from . import _arrays, _buffers, _file_io, _frameworks, _validate, _validate_state, append
from ._types import Array, HostArray, LongArray

_GEOMETRY = "kv.json"


class Geometry(NamedTuple):
    """What is in a `KVFile`."""

    num_layers: int
    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: str  # name of a number format
    checksum: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a layer: [N, 2, B, Hkv, D]."""
        return self.num_blocks, 2, self.block_size, self.num_kv_heads, self.head_dim

    @property
    def stored(self) -> np.dtype[Any]:
        """Dtype of a layer's file: NumPy's own, or its bits."""
        dtype = _arrays.dtype_of(self.dtype)
        return dtype if dtype.isbuiltin == 1 else _arrays.CARRIERS[self.dtype]


class DamagedBlockError(OSError):
    """A block is not what was written: torn by a crash, or damaged since."""


class KVFile:
    """A KV cache on disk: a folder with a plain ``.npy`` for each layer, [N, 2, B, Hkv, D].

    A block's keys and values lie together, so that they are one read. ``numpy.load`` with
    ``mmap_mode`` reads a layer, too: bfloat16 as its bits in uint16, float8 in uint8.

    Parameters
    ----------
    path : path-like
        The folder that `create` made.
    mode : {"r", "r+"}
        Whether it is to be read, or also written.
    direct : bool
        Read blocks past the page cache, with ``O_DIRECT``: for a cache larger than memory, of which
        the pages would only push out others. It takes arrays that begin at a page of 4096 bytes, as
        `KVLayer.pair` makes them; into others, blocks are read through the page cache. Writes and
        checksums go through it.

    Attributes
    ----------
    direct : bool
        Whether blocks are read past the page cache now.

    Raises
    ------
    FileNotFoundError
        If there is no such folder, or its creation did not end.
    ValueError
        If a layer's file has another geometry or length than it should have.

    Warns
    -----
    RuntimeWarning
        Once, if `direct` is asked for and impossible: a block is no multiple of 4096 bytes, or the
        system refuses. Reads then go through the page cache.

    Notes
    -----
    A process must not be forked while one of its threads reads with `direct`; Linux forbids it.

    Blocks may be read by several threads at a time. One that is written while it is read is old,
    new or mixed; with a checksum, mixed is an error.

    Examples
    --------
    >>> import tempfile, numpy as np, numba_attn
    >>> folder = tempfile.mkdtemp() + "/cache"
    >>> sizes = {"num_layers": 2, "num_blocks": 9, "block_size": 16}
    >>> file = numba_attn.KVFile.create(folder, **sizes, num_kv_heads=2, head_dim=64, dtype="int8")
    >>> k, v = np.ones((2, 3, 16, 2, 64), np.int8)
    >>> file.write_blocks(1, [7, 0, 2], k, v)
    >>> read = np.zeros((2, 2, 16, 2, 64), np.int8)
    >>> file.layer(1).read(np.array([2, 3]), *read)
    >>> read.sum(axis=(2, 3, 4)).tolist()
    [[2048, 0], [2048, 0]]
    >>> file.close()
    """

    def __init__(
        self, path: str | os.PathLike[str], mode: str = "r", *, direct: bool = False
    ) -> None:
        if mode not in ("r", "r+"):
            raise ValueError(f"mode: expected 'r' or 'r+', got {mode!r}")
        _validate.flag("direct", direct)
        self.path = pathlib.Path(path)
        self.geometry = _geometry(self.path / _GEOMETRY)
        self._direct = _file_io.Direct(self.path, bool(direct))
        self._layers: list[KVLayer] = []
        try:
            for index in range(self.geometry.num_layers):
                layer = KVLayer(self.path, index, self.geometry, mode, self._direct)
                self._layers.append(layer)
        except BaseException:
            self.close()
            raise

    @property
    def direct(self) -> bool:
        """Whether blocks are read past the page cache now."""
        return self._direct.on

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: Any = "bfloat16",
        checksum: bool = False,
    ) -> KVFile:
        """Make a cache of zeros, which takes no room yet, and open it to be written.

        Parameters
        ----------
        path : path-like
            A folder that does not exist.
        num_layers, num_blocks, block_size, num_kv_heads, head_dim : int
            Of the cache.
        dtype : dtype or str
            One of the dtypes of pools.
        checksum : bool
            Keep a checksum of each block beside it; a block that does not match raises when it is
            read.

        Raises
        ------
        FileExistsError
            If there is such a folder.
        """
        layers, blocks, size, heads, dim = _validate_state.positive_sizes(
            num_layers=num_layers,
            num_blocks=num_blocks,
            block_size=block_size,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
        )
        known = _validate.known_dtype("dtype", dtype, _arrays.POOL_FORMATS)
        _validate.flag("checksum", checksum)
        name = _arrays.format_of(known) or ""
        geometry = Geometry(layers, blocks, size, heads, dim, name, bool(checksum))
        folder = pathlib.Path(path)
        folder.mkdir(parents=True)
        empty = np.uint32(zlib.crc32(bytes(math.prod(geometry.shape[1:]) * known.itemsize)))
        for index in range(geometry.num_layers):
            _file_io.create(_layer_path(folder, index), geometry.shape, geometry.stored)
            if checksum:
                sums = np.full(geometry.num_blocks, empty)
                _file_io.create(_sums_path(folder, index), sums.shape, sums.dtype, sums)
        (folder / _GEOMETRY).write_text(json.dumps(geometry._asdict()))
        return cls(folder, "r+")

    def layer(self, index: int) -> KVLayer:
        """Return a layer, which is read and written by the numbers of its blocks.

        Parameters
        ----------
        index : int
            Of the layer.

        Returns
        -------
        KVLayer
            With ``read(block_ids, k_out, v_out)``, and the sizes and the dtype of its blocks.
        """
        number = operator.index(index)
        if not 0 <= number < len(self._layers):
            raise IndexError(f"layer: must be from 0 to {len(self._layers) - 1}, got {number}")
        return self._layers[number]

    def write_blocks(self, layer: int, block_ids: Any, k: HostArray, v: HostArray) -> None:
        """Write whole blocks in place.

        Parameters
        ----------
        layer : int
            Number of the layer.
        block_ids : int [n]
            Each at most once.
        k, v : [n, B, Hkv, D]
            In the dtype of the cache.
        """
        self.layer(layer).write(block_ids, k, v)

    @_frameworks.taking_arrays("k", writes=())
    def append_kv(self, layer: int, k: Array, v: Array, slot_mapping: Any, **scales: Any) -> None:
        """Write new tokens into their slots, as `numba_attn.append_kv` does.

        The blocks that they are in are read, changed and written: by one thread at a time.

        Parameters
        ----------
        layer : int
            Number of the layer.
        k, v : [T, Hkv, D]
            Keys and values of T tokens.
        slot_mapping : int [T]
            Where each token goes: ``block * B + place in the block``; -1: nowhere.
        **scales : float or [Hkv]
            `k_scale` and `v_scale`. Scales by token are not in the file.
        """
        own = self.layer(layer)
        given = _arrays.to_host(_arrays.integers("slot_mapping", slot_mapping))
        size, end = own.block_size, own.num_blocks * own.block_size
        if given.size and given.max() >= end:
            raise ValueError(f"slot_mapping: must be below N * B = {end}, got {given.max()}")
        slots = given.astype(np.int64)
        blocks, places = np.unique(slots[slots >= 0] // size, return_inverse=True)
        moved = slots.copy()
        moved[slots >= 0] = places * size + slots[slots >= 0] % size
        k_pool, v_pool = own.pair(len(blocks))
        own.read(blocks, k_pool, v_pool)
        append.append_kv(k, v, k_pool, v_pool, moved, **scales)
        own.write(blocks, k_pool, v_pool)

    def sync(self) -> None:
        """Return when all that was written is on the disk."""
        for layer in self._layers:
            layer.sync()

    def close(self) -> None:
        """Close the files; what other threads read or write then ends with a ValueError."""
        for layer in self._layers:
            layer.close()

    def __enter__(self) -> KVFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class KVLayer:
    """One layer of a `KVFile`: a source."""

    def __init__(
        self,
        folder: pathlib.Path,
        index: int,
        geometry: Geometry,
        mode: str,
        direct: _file_io.Direct,
    ) -> None:
        self.index, self.path = index, _layer_path(folder, index)
        self.num_blocks, _, self.block_size, self.num_kv_heads, self.head_dim = geometry.shape
        self.dtype = _arrays.dtype_of(geometry.dtype)
        self._block_shape = geometry.shape[2:]
        self._direct = direct
        self._file = _file_io.Records(self.path, geometry.shape, geometry.stored, mode, direct)
        self._sums: _file_io.Records | None = None
        if geometry.checksum:
            shape = (geometry.num_blocks,)
            try:
                self._sums = _file_io.Records(_sums_path(folder, index), shape, np.uint32, mode)
            except BaseException:
                self.close()
                raise

    @property
    def direct(self) -> bool:
        """Whether blocks are read past the page cache now."""
        return self._direct.on

    def pair(self, num_blocks: int) -> HostArray:
        """Make arrays for blocks, [2, n, B, Hkv, D]: one piece of memory, from a page on."""
        return _buffers.empty((num_blocks, 2, *self._block_shape), self.dtype).swapaxes(0, 1)

    def read(self, block_ids: Any, k_out: HostArray, v_out: HostArray) -> None:
        """Read blocks [n] into arrays [n, B, Hkv, D].

        Raises
        ------
        DamagedBlockError
            If a block does not match its checksum.
        OSError
            If the file cannot be read, or has become shorter.
        """
        ids, (k, v) = self._checked(block_ids, k_out, v_out)
        for name, array in (("k_out", k_out), ("v_out", v_out)):
            if not array.flags.writeable:
                raise ValueError(
                    f"{name}: must be writable, got a read-only array; pass one to be filled"
                )
        self._file.read(ids, (k, v))
        if self._sums is not None:
            kept = np.empty((len(ids), 1), np.uint32)
            self._sums.read(ids, (kept.view(np.uint8),))
            wrong = np.flatnonzero(kept[:, 0] != _sums(k, v))
            if len(wrong):
                raise DamagedBlockError(
                    f"block {ids[wrong[0]]} of layer {self.index} in {self.path} is damaged: it "
                    "does not match its checksum; write it again"
                )

    @_frameworks.taking_arrays("k", writes=())
    def write(self, block_ids: Any, k: HostArray, v: HostArray) -> None:
        """Write blocks; see `KVFile.write_blocks`."""
        ids, pieces = self._checked(block_ids, k, v)
        if len(np.unique(ids)) < len(ids):
            raise ValueError(f"block_ids: must differ, got {ids.tolist()}")
        self._file.write(ids, pieces)
        if self._sums is not None:
            self._sums.write(ids, (_sums(*pieces)[:, None].view(np.uint8),))

    def sync(self) -> None:
        """Return when all that was written is on the disk."""
        for file in (self._file, self._sums):
            if file is not None:
                file.sync()

    def close(self) -> None:
        """Close the files."""
        for file in (self._file, self._sums):
            if file is not None:
                file.close()

    def _checked(
        self, block_ids: Any, k: HostArray, v: HostArray
    ) -> tuple[LongArray, tuple[HostArray, HostArray]]:
        ids = np.asarray(block_ids)
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise TypeError(f"block_ids: expected integers [n], got {ids.dtype} {ids.shape}")
        if ids.size and not 0 <= ids.min() <= ids.max() < self.num_blocks:
            raise ValueError(
                f"block_ids: must be from 0 to {self.num_blocks - 1}, got {ids.min()} to "
                f"{ids.max()}"
            )
        shape = (len(ids), *self._block_shape)
        for name, array in (("k", k), ("v", v)):
            if array.shape != shape or _arrays.format_of(array.dtype) != _arrays.format_of(
                self.dtype
            ):
                raise ValueError(
                    f"{name}: expected {self.dtype} {shape}, got {array.dtype} {array.shape}"
                )
        return ids.astype(np.int64), (_buffers.as_bytes(k), _buffers.as_bytes(v))


def _geometry(path: pathlib.Path) -> Geometry:
    """Read what `KVFile.create` has written last."""
    try:
        found = Geometry(**json.loads(path.read_text()))
        sizes = zip(Geometry._fields[:5], found[:5], strict=True)
        _validate_state.positive_sizes(**dict(sizes))
        _validate.known_dtype("dtype", found.dtype, _arrays.POOL_FORMATS)
        return found
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: is not what KVFile.create writes") from error


def _sums(k: HostArray, v: HostArray) -> HostArray:
    """Return the checksum of each block [n] of bytes [n, size]."""
    sums = (zlib.crc32(values, zlib.crc32(keys)) for keys, values in zip(k, v, strict=True))
    return np.fromiter(sums, np.uint32, len(k))


def _layer_path(folder: pathlib.Path, index: int) -> pathlib.Path:
    return folder / f"layer_{index:04}.npy"


def _sums_path(folder: pathlib.Path, index: int) -> pathlib.Path:
    return folder / f"layer_{index:04}.crc32.npy"
