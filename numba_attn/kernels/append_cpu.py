"""Write new tokens into a pool, on the CPU: the row of each token and kv head in turn."""

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from . import _append, recurrence, rows
from ._append import COMPUTED, CONVERT, COPY
from ._jit import kernel, shared
from ._vector import FLOAT, INT16, INT32

BFLOAT16, FLOAT16, FLOAT32, E4M3FN, E5M2, INT8 = range(len(_append.FORMATS))


def append(tokens, pool, slots, formats, scale, computed):
    """Write the rows of tokens into their slots of a pool.

    Parameters
    ----------
    tokens : [T, Hkv, D], bits of formats[0]
    pool : [N, B, Hkv, D], bits of formats[1]; modified.
    slots : int64 [T]
        Of a token: block * B + place in the block; negative: the token is skipped.
    formats : (str, str)
    scale : float32 [Hkv], [N, B, Hkv] or None
        What the numbers are divided by.
    computed : bool
        The scale, [N, B, Hkv], is computed from each row; modified.
    """
    sizes = (*tokens.shape, pool.shape[1])
    plan = _append.plan(formats, scale is not None, computed)
    scale_at = (0, 0, 0, 0) if scale is None else _locate(scale, 3)
    where = (*_locate(slots, 1)[:1], *_locate(tokens, 2), *_locate(pool, 3), *scale_at)
    _append_rows(sizes, where, *plan)


def _locate(array, axes):
    """Return (address, byte strides of the first axes); 0 for the axes that an array lacks."""
    strides = array.strides[:axes]
    return (array.__array_interface__["data"][0], *(0,) * (axes - len(strides)), *strides)


@kernel
def _append_rows(sizes, where, source, target, mode, itemsize, most):
    """Write all rows; formats and mode, as in `_append.Plan`, are run-time values: one kernel."""
    num_tokens, num_heads, dim, block_size = sizes
    slots, tokens, token, head = where[0], where[1], where[2], where[3]
    pool, pool_block, pool_slot, pool_head = where[4], where[5], where[6], where[7]
    scales, scale_block, scale_slot, scale_head = where[8], where[9], where[10], where[11]
    numbers = np.empty(dim, np.float32)  # of one row
    for t in range(num_tokens):
        slot = rows.load_int64(slots + 8 * t)
        if slot < 0:
            continue
        block, slot = slot // block_size, slot % block_size
        for h in range(num_heads):
            row = tokens + t * token + h * head
            out = pool + block * pool_block + slot * pool_slot + h * pool_head
            if mode == COPY:
                _copy(out, row, dim * itemsize)
                continue
            _load_row(row, numbers, source)
            if mode != CONVERT:
                scale_at = scales + block * scale_block + slot * scale_slot + h * scale_head
                if mode == COMPUTED:
                    _store(scale_at, 0, recurrence.token_scale(_largest(numbers), most))
                scale = rows.load_float32(scale_at)
                for d in range(dim):
                    numbers[d] = recurrence.scaled_down(numbers[d], scale)
            _store_row(out, numbers, target)


@shared
def _load_row(row, numbers, format):
    """Widen a row into float32."""
    if format == BFLOAT16:
        for d in range(len(numbers)):
            numbers[d] = _load_number(row, d, BFLOAT16)
    elif format == FLOAT16:
        for d in range(len(numbers)):
            numbers[d] = _load_number(row, d, FLOAT16)
    else:
        for d in range(len(numbers)):
            numbers[d] = _load_number(row, d, FLOAT32)


@shared
def _largest(numbers):
    """Return the largest magnitude, NaN aside."""
    largest = recurrence.ZERO
    for x in numbers:
        largest = recurrence.larger(largest, abs(x))
    return largest


@shared
def _store_row(row, numbers, format):
    """Round a row of float32 into a format, and store it."""
    if format == FLOAT32:
        for d in range(len(numbers)):
            _store(row, d, numbers[d])
    elif format == INT8:
        for d in range(len(numbers)):
            _store(row, d, recurrence.round_to_int8(numbers[d]))
    elif format == BFLOAT16:
        for d in range(len(numbers)):
            _store(row, d, recurrence.round_to_bfloat16(rows.float_bits(numbers[d])))
    elif format == FLOAT16:
        for d in range(len(numbers)):
            _store(row, d, recurrence.round_to_float16(rows.float_bits(numbers[d])))
    elif format == E4M3FN:
        for d in range(len(numbers)):
            _store(row, d, recurrence.round_to_float8_e4m3fn(rows.float_bits(numbers[d])))
    else:
        for d in range(len(numbers)):
            _store(row, d, recurrence.round_to_float8_e5m2(rows.float_bits(numbers[d])))


@intrinsic
def _store(typing_context, row, i, value):
    """Store element i of a row of numbers of any type."""

    def codegen(context, builder, signature, args):
        builder.store(args[2], _element(builder, args[0], args[2].type, args[1]))
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, value), codegen


@intrinsic
def _copy(typing_context, to, source, size):
    """Copy bytes that do not overlap."""

    def codegen(context, builder, signature, args):
        byte = ir.IntType(8).as_pointer()
        to, source = (builder.inttoptr(address, byte) for address in args[:2])
        cgutils.raw_memcpy(builder, to, source, args[2], 1)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp), codegen


@intrinsic(prefer_literal=True)
def _load_number(typing_context, row, i, format):
    """Load element i of a row of bfloat16, float16 or float32; the format is literal."""
    source = format.literal_value

    def codegen(context, builder, signature, args):
        if source == FLOAT32:
            return builder.load(_element(builder, args[0], FLOAT, args[1]))
        narrow = builder.zext(builder.load(_element(builder, args[0], INT16, args[1])), INT32)
        if source == BFLOAT16:
            return builder.bitcast(builder.shl(narrow, ir.Constant(INT32, 16)), FLOAT)
        return _widen_half(builder, narrow)

    return types.float32(types.intp, types.intp, format), codegen


def _element(builder, row, type, i):
    """Return a pointer to element i, in the form that LLVM can turn loops over i into vectors."""
    return builder.gep(builder.inttoptr(row, type.as_pointer()), [i])


def _widen_half(builder, bits):
    """Widen a float16 in the lower half of an int32, by arithmetic that every CPU has."""
    sign = builder.shl(builder.and_(bits, ir.Constant(INT32, 0x8000)), ir.Constant(INT32, 16))
    magnitude = builder.and_(bits, ir.Constant(INT32, 0x7FFF))
    magnitude = builder.shl(magnitude, ir.Constant(INT32, 13))
    exponents = ir.Constant(FLOAT, 2.0**112)  # from float16's bias to that of float32
    finite = builder.bitcast(builder.fmul(builder.bitcast(magnitude, FLOAT), exponents), INT32)
    special = builder.or_(magnitude, ir.Constant(INT32, 0x7F800000))
    is_special = builder.icmp_unsigned(">=", magnitude, ir.Constant(INT32, 0x7C00 << 13))
    return builder.bitcast(builder.or_(builder.select(is_special, special, finite), sign), FLOAT)
