"""Which process carries which lanes."""

from itertools import pairwise

from lanewise.errors import ConfigError


def lane_ranges(num_lanes: int, world_size: int) -> tuple[range, ...]:
    """Give each process a contiguous range of lanes; the first ones carry one more where it doesn't divide.

    Eight lanes on 1, 2, 3, 5 and 8 processes:

        1    [0 1 2 3 4 5 6 7]
        2    [0 1 2 3] [4 5 6 7]
        3    [0 1 2] [3 4 5] [6 7]
        5    [0 1] [2 3] [4 5] [6] [7]
        8    [0] [1] [2] [3] [4] [5] [6] [7]

    Args:
        num_lanes: lanes of the run.
        world_size: processes of the run, from 1 to `num_lanes`.

    Returns:
        One range of lanes for each rank, in rank order.

    Raises:
        ConfigError: if some process would have no lane, or there is no process.
    """
    if not 1 <= world_size <= num_lanes:
        raise ConfigError(
            f"every process needs at least one lane: got {world_size} processes for {num_lanes} lanes. "
            f"Use 1 to {num_lanes} processes, or a smaller micro_batch_size."
        )
    size, larger = divmod(num_lanes, world_size)
    starts = [rank * size + min(rank, larger) for rank in range(world_size + 1)]
    return tuple(range(start, stop) for start, stop in pairwise(starts))
