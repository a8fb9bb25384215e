"""What the CUDA twin decides on the host, in plain ints; no Numba, testable without a device."""

from __future__ import annotations

import functools
from typing import NamedTuple

from ._arrays import CARRIERS
from ._call import Formats, Options
from ._plan import GROUP_TOKENS, ceil_div

SPLIT_TOKENS = 256
"""Tokens of one split, a power of two and a divisor of the CPU twin's."""

SHARED_BYTES = 48 * 1024
"""Shared memory that every device has for a block's static arrays."""

WIDE = 16
"""Bytes of a wide load."""

TILE_TOKENS = 32
"""Tokens that a block of threads absorbs at a time, or 16 where so many do not fit."""

MOST_THREADS = 128
"""Of a block; their number decides the order of sums, and so the bits."""

HEADS_AT_ONCE = 4
"""Query heads that are scored at a time, so that registers need not hold all of q."""

RING_BYTES = 32 * 1024
"""Most shared memory for tiles on their way; four or more blocks fit a multiprocessor then."""

_STAGES = (4, 2), (1,)  # tiles in the ring, by preference: powers of two
_WARP = 32
_RESIDENT_THREADS = {  # of a multiprocessor, by the most shares of a thread; see below
    True: ((56, 640), (80, 512), (10**9, 384)),  # rows that fit their lanes
    False: ((80, 384), (10**9, 256)),  # guards take registers
}
_OPTION_REGISTERS = 3  # of an option, for each logit that a thread absorbs after its first
_MAX_SHARES = 120  # float32 numbers of q, o and sums that a thread holds in registers


class Deal(NamedTuple):
    """How a row of numbers is dealt to lanes: in pieces, lane i has piece i, i + lanes, ..."""

    length: int  # of the row
    width: int  # numbers of a piece; the last piece is padded
    lanes: int  # that hold a row, a power of two
    parts: int  # pieces of a lane

    @property
    def pieces(self) -> int:
        """Pieces of a row."""
        return ceil_div(self.length, self.width)

    @property
    def fits(self) -> bool:
        """Tell whether all lanes have a piece of every part."""
        return self.pieces == self.lanes * self.parts

    @property
    def share(self) -> int:
        """Numbers of a lane, padding included."""
        return self.width * self.parts

    @property
    def pitch(self) -> int:
        """Numbers from row to row."""
        return self.pieces * self.width


@functools.cache
def deal(length: int, width: int) -> Deal:
    """Deal a row to as many lanes as it has pieces, at most a warp.

    Examples
    --------
    >>> deal(80, 8), deal(576, 8).parts
    (Deal(length=80, width=8, lanes=16, parts=1), 3)
    """
    lanes = min(power_of_two(ceil_div(length, width)), _WARP)
    return Deal(length, width, lanes, ceil_div(length, width * lanes))


def power_of_two(least: int) -> int:
    """Return the first power of two that is at least so large."""
    return 1 << (least - 1).bit_length()


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
    heads: int = 1  # query heads of a block, that share its loads
    stages: int = 1  # tiles in shared memory: those after the first are on their way
    asynchronous: bool = False  # with copies that pass the registers by
    most_threads: int = MOST_THREADS

    @property
    def key(self) -> Deal:
        """How rows of K and q are dealt, to score."""
        return deal(self.head_dim, 8)

    @property
    def value(self) -> Deal:
        """How rows of V and o are dealt, to accumulate."""
        return deal(self.v_head_dim, 4)

    @property
    def threads(self) -> int:
        """Threads of a block: whole warps, enough to score a tile at once."""
        lanes = max(self.key.lanes, self.value.lanes // 2)
        return min(max(self.tile * lanes, _WARP), self.most_threads)

    @property
    def padded_heads(self) -> int:
        """Numbers from token to token in a list of weights, which is read 16 bytes at a time."""
        return power_of_two(self.heads)

    @property
    def tile(self) -> int:
        """Tokens of a tile; it decides the bits, and so depends on shapes and formats only."""
        return TILE_TOKENS if 2 * TILE_TOKENS * self.token_bytes <= RING_BYTES else GROUP_TOKENS

    @property
    def token_bytes(self) -> int:
        """Shared memory of a row of K and of V."""
        itemsizes = (CARRIERS[name].itemsize for name in self.formats[1:])
        pitches = self.key.pitch, self.value.pitch
        return sum(p * size for p, size in zip(pitches, itemsizes, strict=True))

    @property
    def ring_bytes(self) -> int:
        """Shared memory of all tiles."""
        return self.stages * self.tile * self.token_bytes

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block, alignment included."""
        rows = SPLIT_TOKENS * (2 * 8 + 2 * 4 * self.token_scales)
        shares = self.heads * (self.key.pitch + self.value.pitch)
        lists = (self.heads + self.padded_heads) * self.tile + self.padded_heads
        return self.ring_bytes + rows + 4 * (shares + lists + 2 * self.heads) + WIDE

    @property
    def resident_blocks(self) -> int:
        """Blocks that a multiprocessor must have room for: what limits a thread's registers."""
        fits = self.wide and self.key.fits and self.value.fits
        options = self.softcap + self.alibi + self.token_scales
        later_turns = ceil_div(self.heads * self.tile, self.threads) - 1  # to absorb a tile
        needed = self.shares + _OPTION_REGISTERS * options * later_turns
        return next(n for most, n in _RESIDENT_THREADS[fits] if needed <= most) // self.threads

    @property
    def shares(self) -> int:
        """Numbers of q, o and sums that a thread holds at a time."""
        scored = min(self.heads, HEADS_AT_ONCE)
        return scored * (self.key.share + 2) + self.heads * self.value.share


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
    """Choose the `simple` kernel for a pair of pools: one head, one tile at a time.

    Raises
    ------
    ValueError
        If D and Dv are too large for shared memory.

    Examples
    --------
    >>> k_rows, v_rows = Rows(128, (4096, 256, 128), 64, 2), Rows(4096, (2048, 128, 64), 64, 1)
    >>> variant = step_variant(k_rows, v_rows, Formats(v="int8"), Options(scale=1.0, softcap=30.0))
    >>> variant.wide, variant.softcap, variant.threads
    (True, True, 128)
    >>> step_variant(k_rows._replace(address=130), v_rows, Formats(), Options(scale=1.0)).wide
    False
    """
    variant = StepVariant(
        k_rows.length,
        v_rows.length,
        k_rows.wide and v_rows.wide,
        formats,
        options.softcap > 0,
        options.alibi_slopes is not None,
        options.token_scales(),
    )
    if (needed := variant.shared_bytes) > SHARED_BYTES:
        raise ValueError(
            f"k_pool: tiles of {GROUP_TOKENS} tokens must fit {SHARED_BYTES} bytes of shared "
            f"memory on CUDA, got {needed} bytes for D = {k_rows.length} in {formats.k} and "
            f"Dv = {v_rows.length} in {formats.v}; use device='cpu'"
        )
    return variant


def kernel_name(asked: str, most_splits: int) -> str:
    """Return the kernel for a step: `simple` needs no partial states, `split` fills the device.

    Where no row can have more than one split there is nothing to split; the bits are the same.

    Examples
    --------
    >>> kernel_name("auto", 1), kernel_name("auto", 2), kernel_name("simple", 2)
    ('simple', 'split', 'simple')
    """
    if asked != "auto":
        return asked
    return "simple" if most_splits == 1 else "split"


def most_splits(capacity: int, options: Options) -> int:
    """Return the most splits that a row can have, by shapes and options.

    Parameters
    ----------
    capacity : int
        Tokens that a row of the block table has room for.
    options : Options

    Examples
    --------
    >>> most_splits(1000, Options(scale=1.0))
    4
    >>> most_splits(1000, Options(scale=1.0, sliding_window=128))
    2
    """
    most = ceil_div(capacity, SPLIT_TOKENS)
    if options.sliding_window and options.causal:
        most = min(most, ceil_div(options.sliding_window, SPLIT_TOKENS) + 1)
    return most


@functools.lru_cache(maxsize=256)
def split_variant(simple: StepVariant, gqa_ratio: int, asynchronous: bool) -> StepVariant:
    """Choose the `split` kernel: as many heads as registers hold, as many tiles as memory holds.

    Heads are cut into groups of about the same size, of which each reads K and V.

    Examples
    --------
    >>> simple = StepVariant(128, 128, True)
    >>> [split_variant(simple, g, True)[7:9] for g in (1, 4, 7, 8, 12)]
    [(1, 2), (4, 2), (7, 2), (8, 2), (6, 2)]
    >>> split_variant(StepVariant(576, 512, True), 16, True)[7:9]
    (2, 1)
    """
    simple = simple._replace(asynchronous=asynchronous and simple.wide)
    groups = range(1, gqa_ratio + 1)
    sizes = sorted({ceil_div(gqa_ratio, n) for n in groups}, reverse=True)
    variants = (
        simple._replace(heads=heads, stages=stages)
        for choices in _STAGES
        for heads in sizes
        for stages in choices
    )
    return next(variant for variant in variants if _fits(variant))


def _fits(variant: StepVariant) -> bool:
    ring = variant.stages == 1 or variant.ring_bytes <= RING_BYTES
    registers = variant.heads == 1 or variant.shares <= _MAX_SHARES
    return ring and registers and variant.shared_bytes <= SHARED_BYTES
