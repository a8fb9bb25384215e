"""What `shares` has, as LLVM code for a device: straight-line, so that tuples are registers."""

from llvmlite import ir
from numba.core import cgutils
from numba.cuda import types
from numba.cuda.extending import intrinsic

from .. import _arrays
from . import warp
from ._shares import padded, sums_given
from .warp import (
    ALL_LANES,
    F32,
    I32,
    I64,
    SHARED,
    WIDENERS,
    blended,
    copy_at_once,
    copy_in_time,
    element,
)

MOST_UNROLLED = 4  # copies of a thread; more, of an element each, are a loop


def _tuple(count):
    return types.UniTuple(types.float32, count)


def _unpack(builder, value):
    return cgutils.unpack_tuple(builder, value)


def _pack(builder, values):
    return cgutils.pack_array(builder, values)


def _fma(builder, x, y, z):
    return builder.fma(x, y, z)


def _words(builder, pointer, size):
    """Load `size` bytes of shared memory as 32-bit words, 16 bytes at a time."""
    each = min(size, 16) // 4
    kind = ir.VectorType(I32, each) if each > 1 else I32
    words = []
    for start in range(0, size, 4 * each):
        place = builder.gep(pointer, [ir.Constant(I32, start)])
        place = builder.bitcast(place, ir.PointerType(kind, SHARED))
        loaded = builder.load(place, align=4 * each)
        if each == 1:
            words.append(loaded)
        else:
            words += [builder.extract_element(loaded, ir.Constant(I32, i)) for i in range(each)]
    return words


def _widen(builder, words, name):
    """Turn words into the numbers of a format that they hold."""
    bits = 8 * _arrays.CARRIERS[name].itemsize
    for word in words:
        for shift in range(0, 32, bits):
            if name == "bfloat16":  # without a detour over 16 bits
                high = ir.Constant(I32, 0xFFFF0000)
                wide = (
                    builder.and_(word, high) if shift else builder.shl(word, ir.Constant(I32, 16))
                )
                yield builder.bitcast(wide, F32)
            elif name == "float32":
                yield builder.bitcast(word, F32)
            else:
                moved = builder.lshr(word, ir.Constant(I32, shift)) if shift else word
                yield WIDENERS[name](builder, builder.trunc(moved, ir.IntType(bits)))


def loader(name, deal, rows=1):
    """Return the function that loads a lane's share of `rows` rows of a shared array."""
    itemsize = _arrays.CARRIERS[name].itemsize
    size = deal.width * itemsize
    guarded = deal.pieces % deal.lanes != 0

    def load_piece(builder, base, piece):
        inside = builder.icmp_unsigned("<", piece, ir.Constant(I32, deal.pieces))
        if guarded:
            piece = builder.select(inside, piece, ir.Constant(I32, 0))
        place = builder.gep(base, [builder.mul(piece, ir.Constant(I32, size))])
        numbers = list(_widen(builder, _words(builder, place, size), name))
        if guarded:
            zero = ir.Constant(F32, 0.0)
            numbers = [builder.select(inside, x, zero) for x in numbers]
        return numbers

    @intrinsic
    def load_share(typing_context, array, start, lane):
        def codegen(context, builder, signature, args):
            first = element(context, builder, signature, args, 0)
            byte = ir.PointerType(ir.IntType(8), SHARED)
            base = builder.addrspacecast(first, ir.PointerType(first.type.pointee, SHARED))
            base = builder.bitcast(base, byte)
            lane = builder.trunc(args[2], I32)
            share = []
            for row in range(rows):
                begin = builder.gep(base, [ir.Constant(I32, row * deal.pitch * itemsize)])
                for part in range(deal.parts):
                    piece = builder.add(lane, ir.Constant(I32, part * deal.lanes))
                    share += load_piece(builder, begin, piece)
            return _pack(builder, share)

        count = rows * deal.parts * deal.width
        return _tuple(count)(array, types.int64, types.int64), codegen

    return load_share


def copier(name, deal, variant):
    """Return the function with which a block copies a tile of rows to its place in a ring."""
    itemsize = _arrays.CARRIERS[name].itemsize
    size = warp.WIDE if variant.wide else itemsize
    chunks, pitch = deal.length * itemsize // size, deal.pitch * itemsize
    threads, tile = variant.threads, variant.tile
    turns = -(-tile * chunks // threads)
    copy = copy_in_time if variant.asynchronous else copy_at_once

    def number(value):
        return ir.Constant(I32, value)

    def copy_chunk(builder, ring, pool, rows, first, left, i):
        """Copy chunk i of the tile, where it is of one of the tokens that are left."""
        t, chunk = builder.udiv(i, number(chunks)), builder.urem(i, number(chunks))
        inside = builder.icmp_signed("<", t, left)
        if tile * chunks % threads:
            inside = builder.and_(inside, builder.icmp_unsigned("<", t, number(tile)))
        at = builder.mul(chunk, number(size))
        token = builder.select(inside, builder.add(first, t), number(0))
        row = builder.mul(builder.load(builder.gep(rows, [token])), ir.Constant(I64, itemsize))
        source = builder.add(builder.add(pool, row), builder.zext(at, I64))
        target = builder.add(ring, builder.add(builder.mul(t, number(pitch)), at))
        copy(builder, target, source, inside, size)

    @intrinsic
    def copy_rows(typing_context, ring, slot, pool, rows, first, count, thread):
        def codegen(context, builder, signature, args):
            ring, pool, rows = (
                context.make_array(signature.args[i])(context, builder, args[i]).data
                for i in (0, 2, 3)
            )
            slot, first, count, thread = (builder.trunc(args[i], I32) for i in (1, 4, 5, 6))
            ring = builder.addrspacecast(ring, ir.PointerType(ring.type.pointee, SHARED))
            ring = builder.add(builder.ptrtoint(ring, I32), builder.mul(slot, number(tile * pitch)))
            rows = builder.addrspacecast(rows, ir.PointerType(I64, SHARED))
            given = ring, builder.ptrtoint(pool, I64), rows, first, builder.sub(count, first)
            if turns <= MOST_UNROLLED:
                for turn in range(turns):
                    i = builder.add(thread, number(turn * threads))
                    copy_chunk(builder, *given, i)
            else:
                with cgutils.for_range(builder, number(turns)) as loop:
                    i = builder.add(thread, builder.mul(loop.index, number(threads)))
                    copy_chunk(builder, *given, i)
            return context.get_dummy_value()

        numbers = types.int64
        return types.void(ring, numbers, pool, rows, numbers, numbers, numbers), codegen

    return copy_rows


def adder(deal):
    """Return the function that adds a lane's share of rows to a shared array."""
    own = deal.width * deal.parts

    @intrinsic
    def add_share(typing_context, array, share, lane):
        def add_piece(builder, first, numbers, row, piece):
            start = builder.add(
                builder.mul(piece, ir.Constant(I32, deal.width)),
                ir.Constant(I32, row * deal.pitch),
            )
            inside = builder.icmp_unsigned("<", piece, ir.Constant(I32, deal.pieces))
            with builder.if_then(inside):
                for i, x in enumerate(numbers):
                    place = builder.gep(first, [builder.add(start, ir.Constant(I32, i))])
                    builder.store(builder.fadd(builder.load(place), x), place)

        def codegen(context, builder, signature, args):
            first = context.make_array(signature.args[0])(context, builder, args[0]).data
            first = builder.addrspacecast(first, ir.PointerType(F32, SHARED))
            numbers, lane = _unpack(builder, args[1]), builder.trunc(args[2], I32)
            for row in range(len(numbers) // own):
                for part in range(deal.parts):
                    piece = builder.add(lane, ir.Constant(I32, part * deal.lanes))
                    begin = row * own + part * deal.width
                    add_piece(builder, first, numbers[begin : begin + deal.width], row, piece)
            return context.get_dummy_value()

        return types.void(array, share, types.int64), codegen

    return add_share


@intrinsic
def dots(typing_context, q, k):
    """Return the part of q . k that a lane has, for each head: q has the heads' shares."""

    def codegen(context, builder, signature, args):
        q, k = (_unpack(builder, x) for x in args)
        sums = []
        for first in range(0, len(q), len(k)):
            total = builder.fmul(q[first], k[0])
            for i in range(1, len(k)):
                total = _fma(builder, q[first + i], k[i], total)
            sums.append(total)
        return _pack(builder, sums)

    return _tuple(q.count // k.count)(q, k), codegen


@intrinsic
def weigh(typing_context, o, weights, v):
    """Return o + weight * v, head by head."""

    def codegen(context, builder, signature, args):
        o, weights, v = (_unpack(builder, x) for x in args)
        return _pack(
            builder,
            [_fma(builder, weights[i // len(v)], v[i % len(v)], x) for i, x in enumerate(o)],
        )

    return o(o, weights, v), codegen


def rescaler(columns):
    """Return the function that gives o * factor, head by head, each with so many columns."""

    @intrinsic
    def rescale(typing_context, o, factors):
        def codegen(context, builder, signature, args):
            o, factors = (_unpack(builder, x) for x in args)
            return _pack(builder, [builder.fmul(x, factors[i // columns]) for i, x in enumerate(o)])

        return o(o, factors), codegen

    return rescale


def _shuffle(builder, x, step):
    """Return the value of the lane whose number differs in one bit."""
    kind = ir.FunctionType(I32, [I32] * 4)
    name = "llvm.nvvm.shfl.sync.bfly.i32"
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    given = [ir.Constant(I32, ALL_LANES), builder.bitcast(x, I32)]
    given += [ir.Constant(I32, step), ir.Constant(I32, 31)]
    return builder.bitcast(builder.call(function, given), F32)


def _lane(builder):
    kind = ir.FunctionType(I32, [])
    name = "llvm.nvvm.read.ptx.sreg.laneid"
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [])


def row_sums(lanes, count):
    """Return the function that sums `count` values of each lane over the lanes of a row.

    Lane i of a row is given the sums from ``first_sum(lanes, count, i)`` on. Lanes swap halves
    of their values, so that a step of the tree costs half of the one before.
    """

    def swap(builder, values, step):
        upper = builder.and_(_lane(builder), ir.Constant(I32, step))
        upper = builder.icmp_unsigned("!=", upper, ir.Constant(I32, 0))
        half = len(values) // 2
        swapped = []
        for low, high in zip(values[:half], values[half:], strict=True):
            kept = builder.select(upper, high, low)
            sent = builder.select(upper, low, high)
            swapped.append(builder.fadd(kept, _shuffle(builder, sent, step)))
        return swapped

    @intrinsic
    def sum_rows(typing_context, values):
        def codegen(context, builder, signature, args):
            values = _unpack(builder, args[0])
            values += [ir.Constant(F32, 0.0)] * (padded(count) - count)
            step = lanes // 2
            while step:
                if len(values) > 1:
                    values = swap(builder, values, step)
                else:
                    values = [builder.fadd(values[0], _shuffle(builder, values[0], step))]
                step //= 2
            return _pack(builder, values)

        return _tuple(sums_given(lanes, count))(values), codegen

    return sum_rows


def lanes_max(lanes):
    """Return the function that gives the largest of `lanes` neighbouring lanes; no NaN."""

    @intrinsic
    def exchange_largest(typing_context, x):
        def codegen(context, builder, signature, args):
            x, step = args[0], lanes // 2
            while step:
                other = _shuffle(builder, x, step)
                x = builder.select(builder.fcmp_ordered(">", other, x), other, x)
                step //= 2
            return x

        return types.float32(types.float32), codegen

    return exchange_largest


@intrinsic
def gather(typing_context, array, start, stride, count):
    """Return a warp's number of elements, `stride` apart; those past `count` are the last."""

    def codegen(context, builder, signature, args):
        first = element(context, builder, signature, args, 0)
        stride, last = args[2], builder.sub(args[3], ir.Constant(I64, 1))
        numbers = []
        for i in range(warp.WARP):
            place = ir.Constant(I64, i)
            inside = builder.icmp_signed("<", place, last)
            place = builder.mul(builder.select(inside, place, last), stride)
            numbers.append(builder.load(builder.gep(first, [place])))
        return _pack(builder, numbers)

    return _tuple(warp.WARP)(array, types.int64, types.int64, types.int64), codegen


@intrinsic
def scatter(typing_context, array, start, stride, count, numbers):
    """Write numbers to elements `stride` apart, at most so many."""

    def codegen(context, builder, signature, args):
        first = element(context, builder, signature, args, 0)
        for i, x in enumerate(_unpack(builder, args[4])):
            place = ir.Constant(I64, i)
            with builder.if_then(builder.icmp_signed("<", place, args[3])):
                builder.store(x, builder.gep(first, [builder.mul(place, args[2])]))
        return context.get_dummy_value()

    return types.void(array, *(types.int64,) * 3, numbers), codegen


@intrinsic
def left_fold(typing_context, o, numbers, a, b):
    """Return o * a + x * b, number by number: x where a is negative, o where b is."""

    def codegen(context, builder, signature, args):
        o = args[0]
        factors = [
            context.make_array(kind)(context, builder, x).data
            for kind, x in zip(signature.args[2:], args[2:], strict=True)
        ]
        for i, x in enumerate(_unpack(builder, args[1])):
            a, b = (builder.load(builder.gep(p, [ir.Constant(I32, i)])) for p in factors)
            folded = blended(builder, o, a, x, b)
            kept = builder.select(builder.fcmp_ordered("<", b, ir.Constant(F32, 0.0)), o, folded)
            o = builder.select(builder.fcmp_ordered("<", a, ir.Constant(F32, 0.0)), x, kept)
        return o

    return types.float32(types.float32, numbers, a, b), codegen


def column_sums(lanes):
    """Return the function that sums shares over the rows that a warp has at once."""

    @intrinsic
    def sum_columns(typing_context, share):
        def codegen(context, builder, signature, args):
            numbers, step = _unpack(builder, args[0]), warp.WARP // 2
            while step >= lanes:
                numbers = [builder.fadd(x, _shuffle(builder, x, step)) for x in numbers]
                step //= 2
            return _pack(builder, numbers)

        return share(share), codegen

    return sum_columns
