"""What the CUDA twin decides on the host, in plain ints; no Numba, testable without a device."""

from __future__ import annotations

from typing import NamedTuple

from ._call import Formats, Options
from ._plan import GROUP_TOKENS, ceil_div

SPLIT_TOKENS = 128
"""Tokens of one split, a power of two and a divisor of the CPU twin's."""

SHARED_BYTES = 48 * 1024
"""Shared memory that every device has for a block's static arrays."""

WIDE = 16
"""Bytes of a wide load."""

_MAX_THREADS = 128
_WARP = 32


class Span(NamedTuple):
    """An array as one run of memory, in elements."""

    size: int  # from its lowest to its highest address
    offset: int  # of element [0, 0, ...] from the lowest address
    strides: tuple[int, ...]  # 0 for an axis of one element


def span(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> Span:
    """Return the run of memory that a strided array lies in.

    Parameters
    ----------
    shape, strides : tuple of int
        As in NumPy: strides in bytes, possibly negative.
    itemsize : int
        Bytes of an element.

    Raises
    ------
    ValueError
        If a stride is no multiple of the item size.

    Examples
    --------
    >>> span((3, 4), (-16, 2), 2)
    Span(size=20, offset=16, strides=(-8, 1))
    """
    if 0 in shape:
        return Span(0, 0, (0,) * len(shape))
    if any(n > 1 and s % itemsize for n, s in zip(shape, strides, strict=True)):
        raise ValueError(
            f"strides must be multiples of the {itemsize} bytes of an element on CUDA, got strides "
            f"{tuple(strides)} of shape {tuple(shape)}; copy the array"
        )
    steps = tuple(s // itemsize if n > 1 else 0 for n, s in zip(shape, strides, strict=True))
    reach = [(n - 1) * step for n, step in zip(shape, steps, strict=True)]
    offset = -sum(min(r, 0) for r in reach)
    return Span(1 + sum(abs(r) for r in reach), offset, steps)


class StepVariant(NamedTuple):
    """What a CUDA step kernel is compiled for; an option that is off is not in it."""

    head_dim: int  # D
    v_head_dim: int  # Dv
    wide: bool  # rows are loaded 16 bytes at a time, else an element
    formats: Formats = Formats()
    softcap: bool = False
    alibi: bool = False
    token_scales: bool = False

    @property
    def threads(self) -> int:
        """Threads of a block: whole warps, one thread a column where that suffices."""
        columns = max(self.head_dim, self.v_head_dim)
        return min(_WARP * ceil_div(columns, _WARP), _MAX_THREADS)


class Rows(NamedTuple):
    """How the rows of a pool lie in memory, in bytes."""

    address: int  # of the first
    strides: tuple[int, ...]  # from block to block, slot to slot, head to head
    length: int  # elements, D or Dv
    itemsize: int

    @property
    def wide(self) -> bool:
        """Tell whether each row is made of aligned pieces of 16 bytes."""
        places = (self.address, self.length * self.itemsize, *self.strides)
        return all(place % WIDE == 0 for place in places)


def step_variant(k_rows: Rows, v_rows: Rows, formats: Formats, options: Options) -> StepVariant:
    """Choose the step kernel for a pair of pools.

    Raises
    ------
    ValueError
        If D and Dv are too large for shared memory.

    Examples
    --------
    >>> k_rows, v_rows = Rows(128, (4096, 256, 128), 64, 2), Rows(4096, (2048, 128, 64), 64, 1)
    >>> variant = step_variant(k_rows, v_rows, Formats(v="int8"), Options(scale=1.0, softcap=30.0))
    >>> variant.wide, variant.softcap, variant.threads
    (True, True, 64)
    >>> step_variant(k_rows._replace(address=130), v_rows, Formats(), Options(scale=1.0)).wide
    False
    """
    token_scales = options.token_scales()
    needed = shared_bytes(k_rows, v_rows, token_scales)
    if needed > SHARED_BYTES:
        raise ValueError(
            f"k_pool: tiles of {GROUP_TOKENS} tokens must fit {SHARED_BYTES} bytes of shared "
            f"memory on CUDA, got {needed} bytes for D = {k_rows.length} in {formats.k} and "
            f"Dv = {v_rows.length} in {formats.v}; use device='cpu'"
        )
    return StepVariant(
        k_rows.length,
        v_rows.length,
        k_rows.wide and v_rows.wide,
        formats,
        options.softcap > 0,
        options.alibi_slopes is not None,
        token_scales,
    )


def shared_bytes(k_rows: Rows, v_rows: Rows, token_scales: bool) -> int:
    """Return the shared memory of a block of the step kernel, alignment included.

    Examples
    --------
    >>> mla = (Rows(0, (0, 0, 0), length, 2) for length in (576, 512))
    >>> shared_bytes(*mla, token_scales=False)
    41360
    """
    tiles = sum(
        WIDE * ceil_div(GROUP_TOKENS * x.length * x.itemsize, WIDE) for x in (k_rows, v_rows)
    )
    query_and_values = 4 * (k_rows.length + v_rows.length)
    rows = SPLIT_TOKENS * (2 * 8 + 2 * 4 * token_scales)
    logits_and_weights = GROUP_TOKENS * 4 * (2 + token_scales)
    return tiles + query_and_values + rows + logits_and_weights + WIDE
