"""Which sums of `shares.row_sums` a lane is given."""


def padded(count):
    """Return the count that halving goes through: the next power of two."""
    return 1 << (count - 1).bit_length()


def sums_given(lanes, count):
    """Return how many sums `row_sums` gives to each lane."""
    return max(1, padded(count) // lanes)


def first_sum(lanes, count, lane):
    """Return the first sum that `row_sums` gives to a lane of a row."""
    return lane * padded(count) // lanes
