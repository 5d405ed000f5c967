"""Rows as if they had been measured."""

from collections.abc import Mapping, Sequence

from lanewise.commands.bench.job import BenchTurn, First
from lanewise.commands.bench.modes import Mode
from lanewise.commands.bench.row import BenchRow
from lanewise.engine.step.phases import PHASES

COMPUTES = {"data": 0.02, "forward": 0.3, "backward": 0.6, "communication": 0.05, "optimizer": 0.03}
"""Seconds of the phases of a step that computes."""


def turn(
    seconds: float, num_samples: int = 100, num_units: float | None = None, **phases: float
) -> BenchTurn:
    """A turn of ten steps, whose phases are those of one second unless they are given."""
    of_step = {name: phases.get(name, COMPUTES[name]) * 10 for name in PHASES}
    return BenchTurn(10, seconds, num_samples, num_samples if num_units is None else num_units, of_step)


def first(
    rank: int = 0, model: str = "0123456789", peak_bytes: tuple[int, ...] = (2**20,), device: str = "cpu"
) -> First:
    return First(rank, model, peak_bytes, device, (None, None))


def row(
    mode: Mode,
    seconds: Sequence[float],
    phases: Sequence[Mapping[str, float]] = ({},),
    *,
    model: str = "0123456789",
) -> BenchRow:
    """A row with a round for each number of seconds, of a process for each mapping of phases."""
    measured = BenchRow(mode, firsts=[first(rank, model) for rank in range(len(phases))])
    measured.rounds = [[turn(one, **of_process) for of_process in phases] for one in seconds]
    return measured
