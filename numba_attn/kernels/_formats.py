"""The number formats of q, K and V: from bits to floats, as LLVM vectors.

A row is read in chunks of 32 elements. The 16-bit pairs of a chunk of bfloat16 are widened without
a shuffle into its 16 even and its 16 odd elements, and so are pairs of 8-bit floats; the other
formats give the first and the second half. What a chunk gives is the *order* of its format: rows
that meet in a product must have the same order.
"""

from typing import NamedTuple

import llvmlite.binding
import numba
import numpy as np
from llvmlite import ir

from ._vector import (
    INT8,
    INT16,
    INT32,
    LANES,
    V16F,
    V16I,
    V32H,
    load,
    lookup_64,
    shuffle,
    splat_constant,
)

CHUNK = 2 * LANES  # elements widened at a time
V16H = ir.VectorType(INT16, LANES)


class Format(NamedTuple):
    """How a number is stored."""

    name: str
    bits: ir.Type  # of one number
    paired: bool  # the order: even and odd elements, else halves
    factor: float  # times what is widened is the number

    @property
    def itemsize(self):
        """Bytes of one number."""
        return self.bits.width // 8


FORMATS = (
    Format("bfloat16", INT16, True, 1.0),
    Format("float16", INT16, False, 1.0),
    Format("float32", INT32, False, 1.0),
    Format("float8_e4m3fn", INT8, True, 256.0),
    Format("float8_e5m2", INT8, True, 1.0),
    Format("int8", INT8, False, 1.0),
)
BFLOAT16 = 0


def _pair_table(half):
    """Return the bfloat16 bits of 128 positive numbers, given as the bits of float16."""
    with np.errstate(invalid="ignore"):  # signalling NaN
        wide = half.astype(np.uint16).view(np.float16).astype(np.float32)
    return (wide.view(np.uint32) >> 16).tolist()


_CODES = np.arange(128)
PAIR_TABLES = {  # what `widen_chunk` gives for the positive codes, as bfloat16
    "float8_e4m3fn": _pair_table(_CODES << 7 | np.where(_CODES == 127, 0x4000, 0)),
    "float8_e5m2": _pair_table(_CODES << 8),
}


def number(name):
    """Return a format's place in FORMATS: kernels take it as a literal."""
    return [format.name for format in FORMATS].index(name)


def load_chunk(builder, row, first, length, format):
    """Load elements first..first + length (at most 32) of a row, zero past them, no byte beyond."""
    bits, offset = format.bits, first * format.itemsize
    if length == CHUNK:
        return load(builder, row, ir.VectorType(bits, CHUNK), offset, format.itemsize)
    chunk = splat_constant(0, ir.VectorType(bits, CHUNK))
    at = 0
    for width in (16, 8, 4, 2, 1):
        if length & width:
            type = ir.VectorType(bits, width)
            piece = load(builder, row, type, offset + format.itemsize * at, format.itemsize)
            nothing = ir.Constant(type, ir.Undefined)
            wide = shuffle(builder, piece, nothing, [min(i, width) for i in range(CHUNK)])
            lanes = [CHUNK + i - at if at <= i < at + width else i for i in range(CHUNK)]
            chunk = shuffle(builder, chunk, wide, lanes)
            at += width
    return chunk


def widen_chunk(builder, chunk, format):
    """Widen a chunk to two vectors of floats, in the order of the format."""
    if format.name == "bfloat16":
        words = builder.bitcast(chunk, V16I)
        even = builder.shl(words, splat_constant(16, V16I))
        odd = builder.and_(words, splat_constant(-65536, V16I))
        return builder.bitcast(even, V16F), builder.bitcast(odd, V16F)
    if format.paired:
        pairs = builder.bitcast(chunk, V16H)
        even = builder.shl(pairs, splat_constant(8, V16H))
        odd = builder.and_(pairs, splat_constant(-256, V16H))
        if format.name == "float8_e4m3fn":
            even, odd = (_half_from_e4m3(builder, x) for x in (even, odd))
        return _widen_half(builder, even), _widen_half(builder, odd)
    halves = [shuffle(builder, chunk, chunk, range(i, i + LANES)) for i in (0, LANES)]
    if format.name == "float16":
        return tuple(_widen_half(builder, half) for half in halves)
    if format.name == "float32":
        return tuple(builder.bitcast(half, V16F) for half in halves)
    return tuple(builder.sitofp(builder.sext(half, V16I), V16F) for half in halves)


def pair_chunk(builder, chunk, format):
    """Return a chunk as 16 words of two bfloat16, in its natural order, for `pair_dot`."""
    if format.name == "bfloat16":
        return builder.bitcast(chunk, V16I)
    table = PAIR_TABLES[format.name]
    codes = builder.zext(chunk, V32H)
    index = builder.and_(codes, splat_constant(0x7F, V32H))
    low, high = (lookup_64(builder, table[i : i + 64], index) for i in (0, 64))
    is_high = builder.icmp_unsigned(">=", index, splat_constant(64, V32H))
    magnitude = builder.select(is_high, high, low)
    sign = builder.and_(builder.shl(codes, splat_constant(8, V32H)), splat_constant(-0x8000, V32H))
    return builder.bitcast(builder.or_(magnitude, sign), V16I)


def has_pairs(format):
    """Tell whether `pair_chunk` takes a format."""
    return FORMATS[format].name in ("bfloat16", *PAIR_TABLES)


def reorder(builder, x, y, paired, to_paired):
    """Bring the two vectors of a chunk from one order into another."""
    if paired == to_paired:
        return x, y
    if to_paired:
        return tuple(shuffle(builder, x, y, range(i, 2 * LANES, 2)) for i in (0, 1))
    pairs = [i for pair in range(LANES) for i in (pair, pair + LANES)]
    return shuffle(builder, x, y, pairs[:LANES]), shuffle(builder, x, y, pairs[LANES:])


def _half_from_e4m3(builder, x):
    """Return 1 / 256 of float8_e4m3fn, which is in the upper bytes, as the bits of float16.

    The exponent has one bit less, and so another bias; float16 has room for it. NaN alone has all
    bits set: one more is carried into the free bit of the exponent, and that makes NaN of it again.
    """
    wide = builder.and_(builder.ashr(x, splat_constant(1, V16H)), splat_constant(-0x4080, V16H))
    carried = builder.add(wide, splat_constant(0x0080, V16H))
    return builder.or_(wide, builder.and_(carried, splat_constant(0x4000, V16H)))


def _widen_half(builder, bits):
    """Widen 16 float16, given as bits."""
    if _has_half():
        return builder.fpext(builder.bitcast(bits, ir.VectorType(ir.HalfType(), LANES)), V16F)
    wide = builder.sext(bits, V16I)
    sign = builder.and_(wide, splat_constant(-(2**31), V16I))
    magnitude = builder.shl(
        builder.and_(wide, splat_constant(0x7FFF, V16I)), splat_constant(13, V16I)
    )
    finite = builder.fmul(builder.bitcast(magnitude, V16F), splat_constant(2.0**112))
    special = builder.or_(magnitude, splat_constant(0x7F800000, V16I))
    is_special = builder.icmp_unsigned(">=", magnitude, splat_constant(0x7C00 << 13, V16I))
    found = builder.select(is_special, special, builder.bitcast(finite, V16I))
    return builder.bitcast(builder.or_(found, sign), V16F)


def _has_half():
    """Tell whether the CPU converts float16; else LLVM would call a function of the C library."""
    if not numba.config.ENABLE_AVX:
        return False
    machine = llvmlite.binding.get_process_triple().split("-")[0]
    if machine not in ("x86_64", "i686", "i386", "amd64"):
        return True
    features = numba.config.CPU_FEATURES
    if features is None:
        features = llvmlite.binding.get_host_cpu_features().flatten()
    return "+f16c" in features.split(",")
