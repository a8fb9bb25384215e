"""LLVM vectors of 16 floats: what `simd` is written in.

Every function takes an LLVM IR builder and emits code; nothing here knows about attention.
"""

import llvmlite.binding
import numba
from llvmlite import ir
from numba.core import cgutils

LANES = 16
FLOAT = ir.FloatType()
INT8, INT16, INT32, INT64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
V16F = ir.VectorType(FLOAT, LANES)
V16I = ir.VectorType(INT32, LANES)
V32H = ir.VectorType(INT16, 2 * LANES)
UNDEFINED = ir.Constant(V16F, ir.Undefined)

# e^r on [-ln(2)/2, ln(2)/2] with e^0 exact: minimax in the relative error, 2.0e-9 before rounding.
EXP = (
    1.0,
    1.0,
    0.4999999403953552,
    0.16666431725025177,
    0.04166800156235695,
    0.00837415549904108,
    0.0013843653723597527,
)
# (tanh(x) - x) / x^3 in powers of x^2 on [0, 0.625^2]: minimax in tanh's relative error, 4.4e-9.
TANH = (
    -0.3333328068256378,
    0.13331441581249237,
    -0.05373971536755562,
    0.02063908614218235,
    -0.005704986862838268,
)
LOG2E = 1.4426950408889634
LN2_HIGH, LN2_LOW = 0.693359375, -2.1219444005469057e-4  # the first has 9 bits: n * it is exact
LEAST_EXPONENT = -87.33654  # ln(2^-126)


def constant(value, type=INT32):
    """Return an integer constant."""
    return ir.Constant(type, value)


def splat_constant(value, type=V16F):
    """Return a constant with one value in every lane."""
    return ir.Constant(type, [value] * type.count)


def shuffle(builder, x, y, lanes):
    """Pick lanes of x (0..n-1) and y (n..2n-1)."""
    mask = ir.Constant(ir.VectorType(INT32, len(lanes)), list(lanes))
    return builder.shuffle_vector(x, y, mask)


def splat(builder, scalar):
    """Put a scalar in every lane."""
    empty = ir.Constant(ir.VectorType(scalar.type, LANES), ir.Undefined)
    return shuffle(builder, builder.insert_element(empty, scalar, constant(0)), empty, [0] * LANES)


def _pointer(builder, address, type, offset):
    if offset:
        address = builder.add(address, constant(offset, INT64))
    return builder.inttoptr(address, type.as_pointer())


def _call(builder, name, type, arguments):
    """Call an LLVM function by its full name: llvmlite cannot mangle vector types."""
    function = cgutils.get_or_insert_function(builder.module, type, name)
    return builder.call(function, arguments)


def load(builder, address, type, offset=0, align=4):
    """Load a value from address + offset bytes."""
    value = builder.load(_pointer(builder, address, type, offset))
    value.align = align
    return value


def store(builder, value, address, offset):
    """Store a value at address + offset bytes."""
    builder.store(value, _pointer(builder, address, value.type, offset)).align = 4


def prefetch(builder, address, offset):
    """Ask for a cache line to be read into the second-level cache; never faults.

    Not into the first: its few line buffers would be held until the line has come from memory.
    """
    type = ir.FunctionType(ir.VoidType(), [INT8.as_pointer(), INT32, INT32, INT32])
    read, second_level, data = constant(0), constant(2), constant(1)
    line = _pointer(builder, address, INT8, offset)
    _call(builder, "llvm.prefetch.p0", type, [line, read, second_level, data])


def fma(builder, x, y, z):
    """Return x * y + z, rounded once where the CPU can; x * y where z is None."""
    if z is None:
        return builder.fmul(x, y)
    return _call(builder, "llvm.fmuladd.v16f32", ir.FunctionType(V16F, [V16F] * 3), [x, y, z])


def maximum(builder, x, y):
    """Return the larger by lane; y where x is NaN."""
    return builder.select(builder.fcmp_ordered(">", x, y), x, y)


class _BFloat16(ir.Type):
    """LLVM's bfloat, which llvmlite lacks."""

    def _to_string(self):
        return "bfloat"

    def __eq__(self, other):
        return isinstance(other, _BFloat16)

    def __hash__(self):
        return hash(_BFloat16)


def has_pair_dot():
    """Tell whether code for this machine may use AVX512-BF16 (x86 only)."""
    features = numba.config.CPU_FEATURES
    if features is None:
        features = llvmlite.binding.get_host_cpu_features().flatten()
    new_enough = llvmlite.binding.llvm_version_info[0] >= 16  # bfloat in the intrinsic's signature
    return new_enough and bool(numba.config.ENABLE_AVX) and "+avx512bf16" in features.split(",")


def pair_dot(builder, x, y, z):
    """Return z + x * y summed over pairs of bfloat16, by lane: two rounded steps of float32.

    x and y are 16 words of two bfloat16. Subnormal inputs and sums count as 0.
    """
    pairs = ir.VectorType(_BFloat16(), 2 * LANES)
    type = ir.FunctionType(V16F, [V16F, pairs, pairs])
    x, y = (builder.bitcast(words, pairs) for words in (x, y))
    z = splat_constant(0.0) if z is None else z
    return _call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", type, [z, x, y])


def lookup_64(builder, table, index):
    """Look up 32 times in a table of 64 words, by the lowest 6 bits of the index (AVX512-BW)."""
    low, high = (ir.Constant(V32H, table[i : i + 32]) for i in (0, 32))
    type = ir.FunctionType(V32H, [V32H] * 3)
    return _call(builder, "llvm.x86.avx512.vpermi2var.hi.512", type, [low, index, high])


def all_pairs_exact(builder, words):
    """Tell (i1) whether all of 32 bfloat16 are 0 or of magnitude 2^-126 to 2^60."""
    magnitude = builder.and_(builder.bitcast(words, V32H), splat_constant(0x7FFF, V32H))
    zero = builder.icmp_unsigned("==", magnitude, splat_constant(0, V32H))
    above_least = builder.sub(magnitude, splat_constant(0x0080, V32H))
    inside = builder.icmp_unsigned("<=", above_least, splat_constant(0x5D80 - 0x0080, V32H))
    good = builder.bitcast(builder.or_(zero, inside), INT32)
    return builder.icmp_unsigned("==", good, constant(-1))


def lane_sums(builder, vectors):
    """Sum each of up to 16 vectors: lane i of the result is the sum of vectors[i]'s lanes."""
    vectors = [*vectors, *[None] * (LANES - len(vectors))]
    for keep in (2, 4, 8, 16):  # lanes that already belong to different vectors, per pair
        vectors = [
            _fold_pair(builder, vectors[i], vectors[i + 1], keep) for i in range(0, len(vectors), 2)
        ]
    return vectors[0]


def _fold_pair(builder, x, y, keep):
    """Add halves of two vectors, so that one vector holds the partial sums of both."""
    if x is None and y is None:
        return None
    x = UNDEFINED if x is None else x
    y = UNDEFINED if y is None else y
    if keep <= 4:  # within each quarter of 4 lanes
        near = [0, 16, 1, 17] if keep == 2 else [0, 1, 16, 17]
        quarter = [near, [i + 2 for i in near]]
        low, high = ([4 * k + i for k in range(4) for i in q] for q in quarter)
    else:  # whole quarters
        first = (0, 1, 4, 5) if keep == 8 else (0, 2, 4, 6)
        second = (2, 3, 6, 7) if keep == 8 else (1, 3, 5, 7)
        low, high = ([4 * k + i for k in q for i in range(4)] for q in (first, second))
    return builder.fadd(shuffle(builder, x, y, low), shuffle(builder, x, y, high))


def exp_nonpositive(builder, x):
    """Return exp(x) for x <= 0 by lane: 2 ulp; 0 below 2^-126 and for -inf; NaN for NaN.

    exp(x) = 2^n * exp(r), r = x - n * ln(2) in two steps. No fast-math flags: adding and
    subtracting 1.5 * 2^23 rounds to an integer.
    """
    magic = splat_constant(12582912.0)
    shifted = fma(builder, x, splat_constant(LOG2E), magic)
    n = builder.fsub(shifted, magic)
    r = fma(builder, n, splat_constant(-LN2_HIGH), x)
    r = fma(builder, n, splat_constant(-LN2_LOW), r)
    power = splat_constant(EXP[-1])
    for coefficient in EXP[-2::-1]:
        power = fma(builder, power, r, splat_constant(coefficient))
    exponent = builder.shl(builder.bitcast(shifted, V16I), splat_constant(23, V16I))
    result = builder.bitcast(builder.add(builder.bitcast(power, V16I), exponent), V16F)
    tiny = builder.fcmp_ordered("<", x, splat_constant(LEAST_EXPONENT))
    result = builder.select(tiny, splat_constant(0.0), result)
    return builder.select(builder.fcmp_unordered("uno", x, x), x, result)


def tanh(builder, x):
    """Return tanh(x) by lane: 3 ulp, relative also near 0; NaN for NaN.

    x + x^3 P(x^2) up to 0.625, beyond (1 - e^-2|x|) / (1 + e^-2|x|) with the sign of x.
    """
    sign_bit = splat_constant(-(2**31), V16I)
    bits = builder.bitcast(x, V16I)
    sign = builder.and_(bits, sign_bit)
    magnitude = builder.bitcast(builder.xor(bits, sign), V16F)
    decay = exp_nonpositive(builder, builder.fmul(magnitude, splat_constant(-2.0)))
    one = splat_constant(1.0)
    large = builder.fdiv(builder.fsub(one, decay), builder.fadd(one, decay))
    large = builder.bitcast(builder.or_(builder.bitcast(large, V16I), sign), V16F)
    square = builder.fmul(x, x)
    series = splat_constant(TANH[-1])
    for coefficient in TANH[-2::-1]:
        series = fma(builder, series, square, splat_constant(coefficient))
    small = fma(builder, builder.fmul(x, square), series, x)
    is_small = builder.fcmp_ordered("<=", magnitude, splat_constant(0.625))
    return builder.select(is_small, small, large)
