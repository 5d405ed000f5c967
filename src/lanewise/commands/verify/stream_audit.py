"""Checks the audit of a stream, whose samples nobody planned, by the numbers that its lanes gave them."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, final

from lanewise.commands.verify.lane_record import MAX_LANES, Lanes, count
from lanewise.data import StreamCut


@dataclass(frozen=True)
class StreamPlan:
    """How a stream was cut from a step on."""

    first_step: int
    cut: StreamCut
    is_lane_aware: bool
    drop_last: bool
    repeats = draws = False

    @classmethod
    def from_line(cls, line: Mapping[str, Any]) -> "StreamPlan":
        """Read a line of `plan.jsonl`."""
        cut = StreamCut(*(count(line[key]) for key in StreamCut._fields))
        if not (0 < cut.num_lanes <= MAX_LANES and cut.micro_batch_size and cut.window_steps):
            raise ValueError(f"a stream cannot be cut into {cut}")
        is_lane_aware = line["stream"] == "lane-aware"
        return cls(count(line["step"]), cut, is_lane_aware, bool(line["drop_last"]))

    def present_lanes(self, _step: int, lanes: Lanes) -> Sequence[int]:
        """Return the lanes that have samples in a step, as the lines of its lanes tell."""
        present = next((records[0].present for records in lanes.values()), None)
        return range(self.cut.num_lanes) if present is None else present

    def ends_epoch(self, _step: int, lanes: Lanes) -> bool:
        """Tell whether a step is the last one of its epoch, as the lines of its lanes tell."""
        left = [number for records in lanes.values() for number in records[0].upcoming]
        least = self.cut.micro_batch_size if self.drop_last else 1
        return bool(left) and (min(left) if self.drop_last else max(left)) < least


@final
class StreamEpoch:
    """The samples of one epoch, by their numbers in their lane, or in all lanes of a plain stream.

    Args:
        plan: how the stream is cut.
        epoch: from 1.
        first_step: of the epoch, as far as it was audited.
        begins_here: whether the epoch begins with that step.
    """

    def __init__(self, plan: StreamPlan, epoch: int, first_step: int, *, begins_here: bool) -> None:
        self._is_whole = False  # trained to its end
        self._plan = plan
        self._epoch = epoch
        self._first_step = first_step
        self._num_steps = 0
        self._begins_here = begins_here
        self._counts: dict[int, Counter[int]] = defaultdict(Counter)
        """How often each sample came, by lane; under -1 those of all lanes of a plain stream."""
        self._misplaced: list[str] = []

    def add(self, step: int, lanes: Lanes) -> None:
        """Count the samples of a step, the one after the last one that was added."""
        self._num_steps = step + 1 - self._first_step
        self._is_whole |= self._plan.ends_epoch(step, lanes)
        for lane, records in lanes.items():
            self._counts[lane if self._plan.is_lane_aware else -1].update(records[0].indices)
            others = [number for number in records[0].indices if not self._is_due(number, step, lane)]
            if others and self._begins_here:
                self._misplaced.append(
                    f"step {step}, lane {lane}: trained on samples {others} of epoch {self._epoch}, "
                    f"which belong to another step or lane ({records[0].file})"
                )

    def problems(self) -> Iterator[str]:
        """Yield which samples are in another place than they belong, came twice, or never came."""
        yield from self._misplaced
        for lane, counts in sorted(self._counts.items()):
            place = f"epoch {self._epoch}" + (f", lane {lane}" if lane >= 0 else "")
            for number, times in sorted(counts.items()):
                if times > 1:
                    yield f"{place}: sample {number} came {times} times"
            for before, after in pairwise(self._bounded(sorted(counts)) if counts else ()):
                if after > before + 1:
                    which = f"sample {before + 1}" + (f" to {after - 1}" if after > before + 2 else "")
                    yield f"{place}: {which} never came ({after - before - 1} left out)"

    def _is_due(self, number: int, step: int, lane: int) -> bool:
        """Tell whether a sample belongs to a lane in a step, or in the steps of its window."""
        (num_lanes, size, window), of_lane = self._plan.cut, lane
        in_epoch = step - self._first_step
        micro_batch = number // size
        if not self._plan.is_lane_aware:
            micro_batch, of_lane = divmod(micro_batch, num_lanes)
        return of_lane == lane and micro_batch // window == in_epoch // window

    def _bounded(self, numbers: Sequence[int]) -> list[int]:
        """Return the numbers of what must be without a gap, between the numbers before and after them.

        A window may be shuffled, so one that was trained in part may have gaps.
        """
        num_lanes, size, window = self._plan.cut
        of_window = size * window * (1 if self._plan.is_lane_aware else num_lanes)
        begin, end = 0, self._num_steps // window * of_window
        if not self._begins_here and window == 1:
            begin, end = numbers[0], numbers[-1] + 1
        elif not self._begins_here:
            begin, end = (numbers[0] // of_window + 1) * of_window, numbers[-1] // of_window * of_window
        if self._is_whole and not self._plan.drop_last:
            end = numbers[-1] + 1
        end = max(begin, min(end, numbers[-1] + 1))
        return [begin - 1, *(number for number in numbers if begin <= number < end), end]
