"""What was measured of a mode, and what bounds it."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, median
from typing import Any

from lanewise.commands.bench.job import LEAST_ROUNDS, BenchTurn, First
from lanewise.commands.bench.modes import Mode
from lanewise.commands.bench.rounds import MiddleHalf
from lanewise.commands.bench.training import Trained
from lanewise.engine.step.phases import PHASES
from lanewise.processes.device.peak import peak_flops_per_second
from lanewise.processes.watch.heartbeat import BACKWARD, COMMUNICATION, DATA, FORWARD, OPTIMIZER

STEADY = 0.05
"""The widest middle half of a steady row, as a part of its median."""
_LARGE = 0.1
"""The part of a step above which a phase that computes nothing bounds the run."""


@dataclass(eq=False)
class BenchRow:
    """A mode, and what its processes measured."""

    mode: Mode
    planned_bytes: int | None = None
    """What `plan` says that the process with most tensors takes."""
    sent_bytes: float | None = None
    """What `plan` says that a process sends in a step."""
    flops_per_sample: float | None = None
    precision: str = "float32"
    """The precision of the run."""
    firsts: Sequence[First] = ()
    """What each process found in its first steps."""
    rounds: list[Sequence[BenchTurn]] = field(default_factory=list)
    """The turns of all processes, for each round."""
    trained: Trained | None = None
    """What came of some steps and an evaluation; None where they were not asked for, or failed."""
    training_failure: str = ""
    """Why these failed."""
    failure: str = ""
    """Why it could not be measured, or not to the end."""

    def _per_second(self, amount: Callable[[BenchTurn], float]) -> MiddleHalf | None:
        """Return how much a round did in a second; all processes of a world count the same amount."""
        rates = []
        for turns in self.rounds:
            total = sum(map(amount, turns if self.mode.is_ceiling else turns[:1]))
            rates.append(total / max(turn.seconds for turn in turns))
        return MiddleHalf.of(rates) if rates else None

    @property
    def samples_per_second(self) -> MiddleHalf | None:
        """The speed of all devices together; None where nothing was measured."""
        return self._per_second(lambda turn: turn.num_samples)

    @property
    def units_per_second(self) -> MiddleHalf | None:
        """The speed in what the losses count; None where that are samples, or nothing was measured."""
        turns = [turn for turns in self.rounds for turn in turns]
        if all(turn.num_units == turn.num_samples for turn in turns):
            return None
        return self._per_second(lambda turn: turn.num_units)

    def is_faster_than(self, other: "BenchRow") -> bool:
        """Tell whether it is faster beyond the spread: the middle halves of their rounds do not overlap."""
        own, others = self.samples_per_second, other.samples_per_second
        return own is not None and others is not None and own.low > others.high

    @property
    def has_spread(self) -> bool:
        """Whether there are enough rounds to tell how far apart they are."""
        return len(self.rounds) >= LEAST_ROUNDS

    @property
    def is_steady(self) -> bool:
        """Whether the rounds agree; of few it is not known."""
        speed = self.samples_per_second
        return speed is not None and self.has_spread and speed.width <= STEADY

    @property
    def model(self) -> str:
        """The first digits of the digest of the model after the first steps; empty where there is none."""
        return "" if self.mode.is_ceiling or not self.firsts else self.firsts[0].model[:8]

    @property
    def first_bytes(self) -> int | None:
        """The most memory of tensors on the first device; None where it was not counted."""
        return self.firsts[0].peak_bytes[0] if self.firsts and self.firsts[0].peak_bytes else None

    @property
    def fullest_bytes(self) -> int | None:
        """The most memory of tensors on the device that has most; None where it was not counted."""
        return max((size for first in self.firsts for size in first.peak_bytes), default=None)

    @property
    def flops_per_second(self) -> float | None:
        """Floating-point operations of forward and backward that each device does in a second."""
        speed = self.samples_per_second
        if speed is None or not self.flops_per_sample:
            return None
        return self.flops_per_sample * speed.median / self.mode.num_devices

    @property
    def utilization(self) -> float | None:
        """The part of the operations that the device could do (MFU); None where that is not known."""
        flops = self.flops_per_second
        peak = peak_flops_per_second(self.firsts[0].device, self.precision) if self.firsts else None
        return None if flops is None or peak is None else flops / peak

    def phases_of(self, process: int) -> dict[str, float]:
        """Return the seconds of each phase in a step of one process: the median of the rounds."""
        turns = [turns[process] for turns in self.rounds]
        return {name: median(turn.phases[name] / turn.num_steps for turn in turns) for name in PHASES}

    @property
    def shares(self) -> dict[str, float]:
        """The part of a step that each phase takes, on average over the processes."""
        of_each = [self.phases_of(process) for process in range(len(self.firsts))]
        means = {name: fmean(phases[name] for phases in of_each) for name in PHASES}
        return {name: seconds / sum(means.values()) for name, seconds in means.items()}

    def bound(self) -> str:
        """Say what bounds the mode: the largest phase that does not compute, if it is large, else compute."""
        shares = self.shares
        name = max((DATA, COMMUNICATION, OPTIMIZER), key=shares.__getitem__)
        if shares[name] <= _LARGE:
            share = shares[FORWARD] + shares[BACKWARD]
            reached = "" if self.utilization is None else f", at {self.utilization:.0%} of the device's peak"
            return f"compute: forward and backward are {share:.0%} of a step{reached}"
        if name == DATA:
            return f"data: {shares[DATA]:.0%} of a step waits for samples"
        if name == OPTIMIZER:
            return f"the optimizer: its update is {shares[OPTIMIZER]:.0%} of a step"
        return self._bound_of_communication(shares[COMMUNICATION])

    def _bound_of_communication(self, share: float) -> str:
        """Tell the link from other processes, for which the fastest one waits in the communication too."""
        seconds = [self.phases_of(process)[COMMUNICATION] for process in range(len(self.firsts))]
        whole = f"{share:.0%} of a step is communication that nothing hides"
        if min(seconds) < max(seconds) / 2:
            waits = 1 - min(seconds) / max(seconds)
            return f"the slowest process: {whole}, {waits:.0%} of which is waiting for it"
        if self.sent_bytes:
            whole += f", for {self.sent_bytes / 2**20:,.3g} MiB that each process sends"
        return f"the link: {whole}"

    def to_json(self) -> dict[str, Any]:
        """Return all of it as JSON takes it."""
        speed, units = self.samples_per_second, self.units_per_second
        return {
            "name": str(self.mode),
            **self.mode._asdict(),
            "is_ceiling": self.mode.is_ceiling,
            "failure": self.failure or None,
            "samples_per_second": speed and speed._asdict(),
            "units_per_second": units and units._asdict(),
            "num_rounds": len(self.rounds),
            "is_steady": self.is_steady,
            "phases": self.shares if self.rounds else None,
            "bound": self.bound() if self.rounds else None,
            "first_bytes": self.first_bytes,
            "fullest_bytes": self.fullest_bytes,
            "planned_bytes": self.planned_bytes,
            "flops_per_second": self.flops_per_second,
            "utilization": self.utilization,
            "model": self.model or None,
            "trained": self.trained and asdict(self.trained),
            "training_failure": self.training_failure or None,
        }
