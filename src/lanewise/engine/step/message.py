"""The message that each process sends in a step, in one all-gather: lane losses, votes, buffer changes."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from operator import itemgetter
from typing import NamedTuple, TypeAlias

import torch

from lanewise.errors import WorldError, shorten
from lanewise.processes.device.accelerator import float64_device
from lanewise.processes.world.world import World

Votes: TypeAlias = tuple[bool, bool, bool]
"""Whether a process wants to save after a step, to stop there, and to end the run."""
NO_VOTES: Votes = (False, False, False)


class Term(NamedTuple):
    """A loss of a lane as a sum and its weight, or one of several terms of it."""

    value: torch.Tensor | float
    """The sum is `factor` times this: a number, or on an accelerator a scalar tensor."""
    weight: torch.Tensor | float
    factor: float = 1.0


class LaneRow(NamedTuple):
    """The sums of a lane, as its process sends them and as all know them afterwards."""

    lane: int
    terms: tuple[Term, ...]
    """Every lane has the same number of them; the first one is the loss, the last ones are its metrics."""

    @property
    def loss_sum(self) -> float:
        """The loss, added up over its units."""
        return float(self.terms[0].value * self.terms[0].factor)

    @property
    def weight(self) -> float:
        """The weight of the loss."""
        return float(self.terms[0].weight)

    @property
    def numbers(self) -> tuple[float, ...]:
        """The sum and the weight of each term."""
        return tuple(float(one) for value, weight, factor in self.terms for one in (value * factor, weight))


@dataclass
class StepTotals:
    """Totals of a step over all lanes; the same on every rank, for any number of processes."""

    lanes: Sequence[LaneRow]
    """The lanes that had a turn, in order."""
    wants_save: bool = False
    """Whether some rank votes to save a checkpoint after this step."""
    wants_stop: bool = False
    """Whether some rank votes to save and stop after this step, as a signal told it to."""
    wants_end: bool = False
    """Whether some rank votes to end the run after this step, as a callback told it to."""
    buffer_changes: Sequence[float] = ()
    """For each pack of buffers, the largest change of any lane; for `LaneBuffers.merge`."""
    computed_seconds: Sequence[float] = ()
    """What each process told, in the order of ranks; empty where none did."""
    common_losses: Sequence[float] = ()
    """The loss of all samples as each process computed it, likewise; NaN where one could not."""
    upcoming: Sequence[int] | None = None
    """Of a stream, how many samples each lane has in the next step; None where the dataset has an index."""
    metrics: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Sum and weight of each metric of the losses, over all lanes."""

    def __post_init__(self) -> None:
        losses = [terms[0] for _, terms in self.lanes]
        self.loss_sum = sum_or_nan([float(value * factor) for value, _, factor in losses])
        """NaN where some lane's loss is not finite."""
        self.weight = sum_or_nan([float(weight) for _, weight, _ in losses])
        """Weight of the global batch."""

    @property
    def loss(self) -> float:
        """Weighted mean of the loss over the global batch; NaN where the weight is 0."""
        return self.loss_sum / self.weight if self.weight else math.nan

    @property
    def allow_update(self) -> bool:
        """Whether the model may be updated: the weight is not 0, and the loss of every lane is finite."""
        return self.weight > 0 and not math.isnan(self.loss_sum)


def sum_or_nan(values: Iterable[float]) -> float:
    """Add up without intermediate rounding, so the order does not matter; NaN if a term is not finite."""
    try:
        total = math.fsum(values)
    except (ValueError, OverflowError):  # infinite ones of both signs, or finite ones beyond the range
        return math.nan
    return total if math.isfinite(total) else math.nan


@dataclass(slots=True)
class StepMessage:
    """What a process sends to the others in a step: a row for each lane, and numbers to take the maximum of.

    To add another number, add a field, and handle it in `_numbers` and `start_exchange`: after the rows come
    the numbers that are told of each process, the counts of the next step, the votes and the changes.
    """

    rows: list[LaneRow]
    """The rows of the lanes that had a turn."""
    wants_save: bool
    wants_stop: bool
    wants_end: bool
    buffer_changes: Sequence[float] | torch.Tensor
    """What `LaneBuffers.changes` returns; the same number of packs on every rank."""
    num_terms: int = 1
    """Terms in each row."""
    computed_seconds: float | None = None
    """How long this process takes to compute a step; None on every rank where none tells it."""
    common_loss: torch.Tensor | float | None = None
    """The loss of all samples, which each process computes; None on every rank where there is none."""
    upcoming: Sequence[int] | None = None
    """Of a stream, how many samples each lane of this process has in the next step; None on every rank where
    the dataset has an index."""

    def start_exchange(
        self, world: World, most_lanes: int, present: Sequence[int]
    ) -> Callable[[], StepTotals]:
        """Begin to exchange the messages of all processes.

        Collective: every rank must call this, before the backward of its last lane, which the exchange
        overlaps.

        Args:
            world: the processes.
            most_lanes: the largest number of lanes that any process carries.
            present: the lanes of all processes that have a turn.

        Returns:
            A function that waits for the exchange and returns the totals. It raises WorldError if they are
            not of these lanes.
        """
        if world.device.type != "cpu":
            wait = world.start_all_gather_to_host(self._numbers_on(world.device, most_lanes))
        elif world.world_size > 1:
            wait = world.start_all_gather(self._numbers(most_lanes))
        else:
            return self._totals  # without tensors, whose overhead would show in a small step
        size = 1 + 2 * self.num_terms
        end = size * most_lanes
        tells_time, tells_loss = self.computed_seconds is not None, self.common_loss is not None
        counts = end + tells_time + tells_loss
        votes = counts if self.upcoming is None else counts + most_lanes

        def finish() -> StepTotals:
            messages = wait().tolist()
            lanes: list[LaneRow] = []
            for numbers in messages:
                for begin in range(0, end, size):
                    lane, *terms = numbers[begin : begin + size]
                    if lane >= 0:
                        lanes.append(LaneRow(int(lane), tuple(map(Term, terms[::2], terms[1::2]))))
            saves, ends, *changes = map(max, *(numbers[votes:] for numbers in messages), repeat(-math.inf))
            lanes.sort(key=itemgetter(0))
            if world.world_size > 1 and list(map(itemgetter(0), lanes)) != list(present):
                raise _other_lanes(lanes, present)
            seconds = [numbers[end] for numbers in messages] if tells_time else ()
            losses = [numbers[end + tells_time] for numbers in messages] if tells_loss else ()
            upcoming = None
            if self.upcoming is not None:
                told = (number for numbers in messages for number in numbers[counts:votes])
                upcoming = [int(number) for number in told if number >= 0]
            return StepTotals(lanes, bool(saves), ends == 2, ends == 1, changes, seconds, losses, upcoming)

        return finish

    def _numbers(self, most_lanes: int) -> torch.Tensor:
        """Return the message as float64 on the CPU, equally long on every rank; a missing row has lane -1.

        A row is the lane, and the sum and the weight of each term.
        """
        numbers: list[float] = []
        for lane, terms in self.rows:
            numbers.append(lane)
            for value, weight, factor in terms:
                numbers += float(value * factor), float(weight)
        numbers += [-1, *[0.0] * 2 * self.num_terms] * (most_lanes - len(self.rows))
        told = (self.computed_seconds, self.common_loss)
        numbers += [float(one) for one in told if one is not None]
        if self.upcoming is not None:
            numbers += *self.upcoming, *[-1] * (most_lanes - len(self.upcoming))
        numbers += self.wants_save, 2 * self.wants_stop or self.wants_end  # a signal comes first
        return torch.tensor([*numbers, *self.buffer_changes], dtype=torch.float64)

    def _numbers_on(self, device: torch.device, most_lanes: int) -> torch.Tensor:
        """Return the same message on an accelerator, without waiting for what is there."""
        rows: list[LaneRow] = []
        there: dict[int, torch.Tensor] = {}
        position = 0
        for lane, terms in self.rows:
            position += 1
            known: list[float] = []
            for number in (number for term in terms for number in term[:2]):
                if isinstance(number, torch.Tensor):
                    there[position] = number
                known.append(1.0 if isinstance(number, torch.Tensor) else number)
                position += 1
            factors = [term.factor for term in terms]
            rows.append(LaneRow(lane, tuple(map(Term, known[::2], known[1::2], factors))))
        message = replace(self, rows=rows, buffer_changes=())
        if isinstance(self.common_loss, torch.Tensor):
            place = (1 + 2 * self.num_terms) * most_lanes + (self.computed_seconds is not None)
            there[place], message.common_loss = self.common_loss, 1.0
        device = float64_device(device)
        numbers = StepMessage._numbers(message, most_lanes).to(device, non_blocking=True)
        for position, number in there.items():
            numbers[position].mul_(number.to(device))
        changes = self.buffer_changes
        return torch.cat([numbers, changes.to(device)]) if isinstance(changes, torch.Tensor) else numbers

    def _totals(self) -> StepTotals:
        """Return the totals of a run with one process."""
        assert not isinstance(self.buffer_changes, torch.Tensor), "on a CPU the changes are numbers"
        ends = self.wants_end and not self.wants_stop
        votes = self.wants_save, self.wants_stop, ends
        return StepTotals(self.rows, *votes, self.buffer_changes, upcoming=self.upcoming)


def _other_lanes(rows: Sequence[LaneRow], present: Sequence[int]) -> WorldError:
    told = [row.lane for row in rows]
    return WorldError(
        f"the processes told of the lanes {shorten(told)}, and the step has {shorten(present)}: what "
        "some process sent arrived as something else, so the step was not taken. Look for a fault of the "
        "network, the driver or a device (`lanewise doctor`), and go on with --resume."
    )
