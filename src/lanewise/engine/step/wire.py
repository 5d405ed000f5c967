"""How the messages of a step travel: each as a row of float64 numbers, all of them in one all-gather."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, final

import torch

from lanewise.config import Equality
from lanewise.lanes import Placement
from lanewise.processes.device.accelerator import float64_device
from lanewise.processes.world.world import World


@final
@dataclass(frozen=True)
class Spread:
    """How the lanes of a run are spread over processes, and what these promise."""

    world: World
    """The processes."""
    placement: Placement
    """Which process carries which lanes."""
    equality: Equality
    """The grade."""


class Votes(NamedTuple):
    """What a process wants after a step."""

    save: bool = False
    """To save a checkpoint."""
    stop: bool = False
    """To save and stop, as a signal told it to."""
    end: bool = False
    """To end the run, as a callback told it to."""


class Term(NamedTuple):
    """A sum and its weight: a lane's loss, or a metric that its loss reports."""

    value: torch.Tensor | float
    """The sum is `factor` times this: a number, or on an accelerator a scalar tensor."""
    weight: torch.Tensor | float
    factor: float = 1.0


class LaneRow(NamedTuple):
    """The sums of a lane, as its process sends them and as all know them afterwards."""

    lane: int
    terms: tuple[Term, ...]
    """The loss, and then its metrics; every lane has the same number of them."""

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
        return tuple(
            float(number) for value, weight, factor in self.terms for number in (value * factor, weight)
        )


class Report(NamedTuple):
    """What a process tells in a step."""

    lanes: Sequence[LaneRow]
    """Its lanes that had a turn."""
    votes: Votes
    buffer_changes: Sequence[float] | torch.Tensor
    """What the lanes made of buffers; as many numbers, or packs, on every rank."""
    computed_seconds: float | None = None
    """How long the process takes to compute a step; None on every rank where none tells it."""
    common_loss: torch.Tensor | float | None = None
    """The loss of all samples, which each process computes; None on every rank where there is none."""
    upcoming: Sequence[int] | None = None
    """How many samples of a stream each lane of the process has in the next step; None on every rank where
    the dataset has an index."""


def start_exchange(told: Report, world: World, most_lanes: int, num_terms: int) -> Callable[[], list[Report]]:
    """Begin to exchange what the processes tell.

    Collective: every rank must call this, before the backward of its last lane, which the exchange overlaps.

    Args:
        told: by this process.
        world: the processes.
        most_lanes: the largest number of lanes that any process carries.
        num_terms: the number of terms in each row.

    Returns:
        A function that waits for the exchange, and returns what each process told.
    """
    numbers = _encode(told, world.device, most_lanes, num_terms)
    to_host = world.start_all_gather if world.device.type == "cpu" else world.start_all_gather_to_host
    wait = to_host(numbers)
    return lambda: [_decode(of_rank, told, most_lanes, num_terms) for of_rank in wait().tolist()]


def _encode(told: Report, device: torch.device, most_lanes: int, num_terms: int) -> torch.Tensor:
    """Return a message as float64, equally long on every rank, without waiting for the device.

    A row is the lane, and the sum and the weight of each term; a missing row has lane -1.
    """
    numbers: list[float] = []
    there: dict[int, torch.Tensor] = {}
    """What only the device knows, by its position."""
    for lane, terms in told.lanes:
        numbers.append(lane)
        for value, weight, factor in terms:
            for number, times in ((value, factor), (weight, 1.0)):
                if isinstance(number, torch.Tensor):
                    there[len(numbers)] = number
                    numbers.append(times)
                else:
                    numbers.append(number * times)
    numbers += [-1, *[0.0] * 2 * num_terms] * (most_lanes - len(told.lanes))
    numbers += told.votes
    if told.computed_seconds is not None:
        numbers.append(told.computed_seconds)
    if isinstance(told.common_loss, torch.Tensor):
        there[len(numbers)] = told.common_loss
        numbers.append(1.0)
    elif told.common_loss is not None:
        numbers.append(told.common_loss)
    if told.upcoming is not None:
        numbers += *told.upcoming, *[-1] * (most_lanes - len(told.upcoming))
    device, changes = float64_device(device), told.buffer_changes
    if not isinstance(changes, torch.Tensor):
        numbers += changes
    row = torch.tensor(numbers, dtype=torch.float64).to(device, non_blocking=True)
    for position, tensor in there.items():
        row[position].mul_(tensor.to(device))
    return torch.cat([row, changes.to(device)]) if isinstance(changes, torch.Tensor) else row


def _decode(row: Sequence[float], own: Report, most_lanes: int, num_terms: int) -> Report:
    """Return what a process told; it told the same kinds of things as this one."""
    numbers = iter(row)
    lanes: list[LaneRow] = []
    for _ in range(most_lanes):
        lane, *terms = islice(numbers, 1 + 2 * num_terms)
        if lane >= 0:
            lanes.append(LaneRow(int(lane), tuple(map(Term, terms[::2], terms[1::2]))))
    votes = Votes(*map(bool, islice(numbers, len(Votes._fields))))
    seconds = None if own.computed_seconds is None else next(numbers)
    common_loss = None if own.common_loss is None else next(numbers)
    upcoming = None
    if own.upcoming is not None:
        upcoming = [int(number) for number in islice(numbers, most_lanes) if number >= 0]
    return Report(lanes, votes, list(numbers), seconds, common_loss, upcoming)
