"""The positions of the epoch's order that each lane reads in each step, also in the partial last one."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import NamedTuple

from lanewise.lanes.tree import Present


@dataclass(frozen=True)
class Schedule:
    """How an epoch of samples is cut into steps, and a step into lanes.

    Twenty samples in global batches of 8 and micro-batches of 2 (four lanes) are three steps. A cell holds
    the positions in the epoch's order; the last step has 4 samples, so it uses the first two lanes only:

        step     lane 0     lane 1     lane 2     lane 3
          0      0  1       2  3       4  5       6  7
          1      8  9      10 11      12 13      14 15
          2     16 17      18 19        -          -

    A partial step of r samples uses the first ceil(r / micro_batch_size) lanes, as evenly as possible: with
    9 samples in micro-batches of 4 the lanes hold 3, 3, 3 and none. No sample is duplicated or padded.

    Steps are counted over the whole run; `step // steps_per_epoch` is the epoch.
    """

    num_samples: int
    """Samples in the dataset."""
    global_batch_size: int
    """Samples in one optimizer step."""
    micro_batch_size: int
    """Samples that one lane gives to one forward; divides `global_batch_size`."""
    drop_last: bool = False
    """Leave out the partial last step of every epoch."""

    def __post_init__(self) -> None:
        whole, micro = self.global_batch_size, self.micro_batch_size
        if min(whole, micro) < 1 or whole % micro:
            raise ValueError(
                f"global_batch_size must be a positive multiple of micro_batch_size: got {whole} and {micro}."
            )

    @cached_property
    def num_lanes(self) -> int:
        """Lanes of the run."""
        return self.global_batch_size // self.micro_batch_size

    @cached_property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in one epoch; 0 where the dataset is empty, or too small and `drop_last` is set."""
        full_steps, rest = divmod(self.num_samples, self.global_batch_size)
        return full_steps + (rest > 0 and not self.drop_last)

    def num_samples_in(self, step: int) -> int:
        """Count the samples of all lanes in a step."""
        return len(self._positions_of(step))

    def num_samples_before(self, step: int) -> int:
        """Count the samples of all steps before this one, over all epochs."""
        epochs, steps = divmod(step, self.steps_per_epoch)
        per_epoch = min(self.num_samples, self.steps_per_epoch * self.global_batch_size)
        return epochs * per_epoch + steps * self.global_batch_size

    def num_samples_of(self, lane: int) -> int:
        """Count the samples of a lane in an epoch."""
        full_steps = self.num_samples // self.global_batch_size
        rest = len(self.positions(full_steps, lane)) if self.steps_per_epoch > full_steps else 0
        return full_steps * self.micro_batch_size + rest

    def num_present_lanes(self, step: int) -> int:
        """Count the lanes that have samples in a step: they are the first ones."""
        return -(-self.num_samples_in(step) // self.micro_batch_size)

    def positions(self, step: int, lane: int) -> range:
        """Return the positions in the epoch's order that a lane reads in a step; empty for an absent lane."""
        return _shares(self._positions_of(step), self.num_present_lanes(step), range(lane, lane + 1))[0]

    def turns(self, lanes: range, first_step: int, last_step: int | None) -> Iterator["LaneTurn"]:
        """Yield what a process that carries `lanes` does in steps `first_step` to `last_step - 1`, in order.

        Where `last_step` is None, the steps have no end.

        A process whose lanes are all empty in a step still takes part in it: it gets one turn without
        positions, under its first lane.
        """
        for step in count(first_step) if last_step is None else range(first_step, last_step):
            epoch, of_step = step // self.steps_per_epoch, self._positions_of(step)
            num_present = -(-len(of_step) // self.micro_batch_size)
            present = range(num_present)
            last = max(lanes.start, min(lanes.stop, num_present) - 1)
            shares = _shares(of_step, num_present, range(lanes.start, last + 1))
            for lane, positions in enumerate(shares, lanes.start):
                yield LaneTurn(epoch, step, lane, positions, present, lane == last)

    def _positions_of(self, step: int) -> range:
        """Return the positions of all lanes in a step."""
        start = step % self.steps_per_epoch * self.global_batch_size
        return range(start, min(start + self.global_batch_size, self.num_samples))


@dataclass(frozen=True)
class SequentialSchedule:
    """How a dataset that is read once, in order, is cut into one range for each lane, and into micro-batches.

    Eleven samples over four lanes in micro-batches of two; a bar ends a micro-batch:

        lane 0      0  1 |  2
        lane 1      3  4 |  5
        lane 2      6  7 |  8
        lane 3      9 10

    The ranges differ by at most one sample. With fewer samples than lanes the last lanes are absent.
    """

    num_samples: int
    num_lanes: int
    micro_batch_size: int
    """The largest number of samples that a lane gives to one forward."""

    def turns(self, lanes: range) -> Iterator["LaneTurn"]:
        """Yield what a process that carries `lanes` reads, lane after lane; `step` counts within a lane.

        A process whose lanes are all empty gets one turn without positions.
        """
        num_present = min(self.num_lanes, self.num_samples)
        if lanes.start >= num_present:
            yield LaneTurn(0, 0, lanes.start, range(0), range(num_present), is_last=True)
            return
        present = range(num_present)
        for lane, share in zip(lanes, _shares(range(self.num_samples), self.num_lanes, lanes), strict=True):
            for step, first in enumerate(share[:: self.micro_batch_size]):
                last = min(first + self.micro_batch_size, share.stop)
                yield LaneTurn(0, step, lane, range(first, last), present, is_last=last == share.stop)


def _shares(positions: range, num_lanes: int, lanes: range) -> list[range]:
    """Return the positions of some lanes where `num_lanes` share all as evenly as possible."""
    size, larger = divmod(len(positions), num_lanes)
    shares, first = [], lanes.start * size + min(lanes.start, larger)
    for lane in lanes:
        stop = first + size + (lane < larger)
        shares.append(positions[first:stop])
        first = stop
    return shares


class LaneTurn(NamedTuple):
    """What one lane reads in one step."""

    epoch: int
    step: int
    """Optimizer step, counted over the whole run."""
    lane: int
    positions: range
    """Positions in the epoch's order; empty where the process has no sample in this step."""
    present: Present
    """Lanes of all processes that have samples in this step."""
    is_last: bool
    """Whether this is the last lane that the process works through in this step; in a `SequentialSchedule`,
    whether it is the lane's last micro-batch."""
