"""Which sums of `shares.row_sums` a lane is given."""

from .._plan_cuda import power_of_two


def sums_given(lanes, count):
    """Return how many sums `row_sums` gives to each lane."""
    return max(1, power_of_two(count) // lanes)


def first_sum(lanes, count, lane):
    """Return the first sum that `row_sums` gives to a lane of a row."""
    return lane * power_of_two(count) // lanes
