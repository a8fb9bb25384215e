"""What `shares` has, in Python, for Numba's CUDA simulator; imported only inside it."""

from .. import _arrays
from . import warp
from ._shares import first_sum, sums_given
from ._simulator import exchange, lane_of_thread


def loader(name, deal, rows=1):
    """Return the function that loads a lane's share of `rows` rows of a shared array."""
    load, (_, width, lanes, parts) = warp.LOADERS[name], deal
    pieces, pitch = deal.pieces, deal.pitch

    def load_share(array, start, lane):
        assert start % width == 0
        share = []
        for row in range(rows):
            for piece in range(lane, lanes * parts, lanes):
                at = start + row * pitch + piece * width
                inside = piece < pieces
                share += [load(array, at + i) if inside else 0.0 for i in range(width)]
        return tuple(share)

    return load_share


def copier(name, deal, variant):
    """Return the function with which a block copies a tile of rows to its place in a ring."""
    width = 16 // _arrays.CARRIERS[name].itemsize if variant.wide else 1
    copy = warp.copy_16_bytes if variant.wide else warp.copy_element
    copy = warp.start_copy if variant.asynchronous else copy
    chunks, pitch = deal.length // width, deal.pitch
    threads, tile = variant.threads, variant.tile

    def copy_rows(ring, slot, pool, rows, first, count, thread):
        for i in range(thread, min(tile, count - first) * chunks, threads):
            t, chunk = divmod(i, chunks)
            to = (slot * tile + t) * pitch + chunk * width
            copy(ring, to, pool, rows[first + t] + chunk * width)

    return copy_rows


def adder(deal):
    """Return the function that adds a lane's share of rows to a shared array."""

    def add_share(array, share, lane):
        own = deal.width * deal.parts
        for i, x in enumerate(share):
            row, place = divmod(i, own)
            piece = lane + place // deal.width * deal.lanes
            if piece < deal.pieces:
                array[row * deal.pitch + piece * deal.width + place % deal.width] += x

    return add_share


def dots(q, k):
    """Return the part of q . k that a lane has, for each head: q has the heads' shares."""
    heads = range(0, len(q), len(k))
    return tuple(sum(q[h + i] * k[i] for i in range(len(k))) for h in heads)


def weigh(o, weights, v):
    """Return o + weight * v, head by head."""
    return tuple(x + weights[i // len(v)] * v[i % len(v)] for i, x in enumerate(o))


def rescaler(columns):
    """Return the function that gives o * factor, head by head, each with so many columns."""
    return lambda o, factors: tuple(x * factors[i // columns] for i, x in enumerate(o))


def _tree(xs):
    while len(xs) > 1:
        half = len(xs) // 2
        xs = [x + y for x, y in zip(xs[:half], xs[half:], strict=True)]
    return xs[0]


def row_sums(lanes, count):
    """Return the function that sums `count` values of each lane over the lanes of a row.

    Lane i of a row is given the sums from ``first_sum(lanes, count, i)`` on.
    """
    given = sums_given(lanes, count)

    def sum_rows(values):
        lane = lane_of_thread()
        row = exchange(values)[lane - lane % lanes :][:lanes]
        first = first_sum(lanes, count, lane % lanes)
        sums = [_tree([x[i] for x in row]) for i in range(count)] + [0.0] * (given + lanes)
        return tuple(sums[first : first + given])

    return sum_rows


def lanes_max(lanes):
    """Return the function that gives the largest of `lanes` neighbouring lanes; no NaN."""

    def find(x):
        lane = lane_of_thread()
        return max(exchange(x)[lane - lane % lanes :][:lanes])

    return find


def gather(array, start, stride, count):
    """Return a warp's number of elements, `stride` apart; those past `count` are the last."""
    return tuple(array[start + min(i, count - 1) * stride] for i in range(warp.WARP))


def scatter(array, start, stride, count, numbers):
    """Write numbers to elements `stride` apart, at most so many."""
    for i, x in enumerate(numbers[: max(count, 0)]):
        array[start + i * stride] = x


def left_fold(o, numbers, a, b):
    """Return o * a + x * b, number by number: x where a is negative, o where b is."""
    for x, by, of in zip(numbers, a, b, strict=True):
        if by < 0:
            o = x
        elif not of < 0:
            o = o * by + x * of
    return o


def column_sums(lanes):
    """Return the function that sums shares over the rows that a warp has at once."""

    def sum_columns(share):
        lane = lane_of_thread()
        rows = exchange(share)[lane % lanes :: lanes]
        return tuple(_tree([row[i] for row in rows]) for i in range(len(share)))

    return sum_columns
