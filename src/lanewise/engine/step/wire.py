"""How the messages of a step travel: each as a row of float64 numbers, all of them in one all-gather."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter
from typing import Any, NamedTuple, final

import torch

from lanewise.config import Equality
from lanewise.lanes import Placement
from lanewise.processes.device.accelerator import float64_device
from lanewise.processes.world.world import World


@final
@dataclass(frozen=True)
class Spread:
    """Who carries which lanes, and in which grade they are added up."""

    world: World
    """The processes."""
    placement: Placement
    """Which process carries which lanes."""
    equality: Equality
    """The grade: `close` or `exact`."""


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


def start_exchange(
    lanes: Sequence[LaneRow], others: Mapping[str, Any], world: World, most_lanes: int, num_terms: int
) -> Callable[[], tuple[list[LaneRow], Mapping[str, Iterable[Any]]]]:
    """Begin to exchange what the processes send.

    Collective: every rank must call this, before the backward of its last lane, which the exchange overlaps.

    Args:
        lanes: what this process sends of its lanes.
        others: what else it sends, by name: sequences of numbers, on an accelerator also tensors of them. The
            same names in one order, and as many numbers of each, on every rank.
        world: the processes.
        most_lanes: the largest number of lanes that any process carries.
        num_terms: the number of terms in each row.

    Returns:
        A function that waits for the exchange, and returns the lanes of all processes, in order, and by name
        what else these sent, in the order of ranks; what is empty is left out.
    """
    numbers, places = _encode(lanes, others, world.device, most_lanes, num_terms)
    to_host = world.start_all_gather if world.device.type == "cpu" else world.start_all_gather_to_host
    wait = to_host(numbers)

    def receive() -> tuple[list[LaneRow], Mapping[str, Iterable[Any]]]:
        of_ranks = wait().tolist()
        rows = [row for of_rank in of_ranks for row in _decode(of_rank, most_lanes, num_terms)]
        sent = {name: map(itemgetter(place), of_ranks) for name, place in places.items()}
        return sorted(rows, key=itemgetter(0)), sent

    return receive


def _encode(
    lanes: Sequence[LaneRow], others: Mapping[str, Any], device: torch.device, most_lanes: int, num_terms: int
) -> tuple[torch.Tensor, dict[str, slice]]:
    """Return a message as float64, equally long on every rank, and where in it what is; waits for no device.

    A row is the lane, and the sum and the weight of each term; a missing row has lane -1.
    """
    numbers: list[float] = []
    there: dict[int, torch.Tensor] = {}
    """What only the device knows, by its position."""
    for lane, terms in lanes:
        numbers.append(lane)
        for value, weight, factor in terms:
            for number, times in ((value, factor), (weight, 1.0)):
                if isinstance(number, torch.Tensor):
                    there[len(numbers)] = number
                    numbers.append(times)
                else:
                    numbers.append(number * times)
    numbers += [-1, *[0.0] * 2 * num_terms] * (most_lanes - len(lanes))
    places: dict[str, slice] = {}
    for name, sent in others.items():
        if isinstance(sent, torch.Tensor):
            there[len(numbers)] = sent
        if len(sent):
            places[name] = slice(len(numbers), len(numbers) + len(sent))
            numbers += [1.0] * len(sent) if isinstance(sent, torch.Tensor) else sent
    device = float64_device(device)
    row = torch.tensor(numbers, dtype=torch.float64).to(device, non_blocking=True)
    for position, tensor in there.items():
        row[position : position + tensor.numel()].mul_(tensor.to(device))
    return row, places


def _decode(row: Sequence[float], most_lanes: int, num_terms: int) -> list[LaneRow]:
    """Return what a process sent of its lanes."""
    numbers = iter(row)
    lanes: list[LaneRow] = []
    for _ in range(most_lanes):
        lane, *terms = islice(numbers, 1 + 2 * num_terms)
        if lane >= 0:
            lanes.append(LaneRow(int(lane), tuple(map(Term, terms[::2], terms[1::2]))))
    return lanes
