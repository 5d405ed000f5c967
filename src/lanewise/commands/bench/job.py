"""Trains one mode in turns: each process takes steps when it is told to, and says how long they took."""

import logging
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain, islice, repeat
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, final

import torch
from torch import nn

from lanewise.commands.bench.connection import connect, receive, send
from lanewise.commands.jobs.job import Job
from lanewise.config import EvaluateConfig
from lanewise.data import digest
from lanewise.engine.engine import Engine
from lanewise.engine.run.build import build_run, build_task
from lanewise.engine.run.run import Run
from lanewise.engine.step.metrics import LogInterval, StepReport
from lanewise.processes.device.accelerator import device_name, peak_bytes
from lanewise.processes.device.free_memory import free_bytes
from lanewise.processes.device.live_storage import LiveStorage
from lanewise.processes.watch.heartbeat import heartbeat
from lanewise.processes.world.shards import whole
from lanewise.processes.world.world import World

NUM_FIRST_STEPS = 4
"""The steps of the run after which its model is compared."""
_MEMORY_STEPS, _MEMORY_SECONDS = 16, 1.0
"""The most steps in which memory is measured, as batches differ; and the time for those after the first."""
LEAST_ROUNDS = 5
"""Fewer rounds tell nothing of how much they differ."""
LEAST_STEPS, _MOST_STEPS = 2, 500
"""The bounds on the number of steps in a turn."""
_TURN_SECONDS = 0.4
"""How long a turn should take."""
_SECONDS_BETWEEN_BEATS = 5.0
_ENDLESS = 2**40


@dataclass(frozen=True)
class First:
    """What a process found in the first steps of the run."""

    rank: int
    model: str
    """The digest of the model after them."""
    peak_bytes: Sequence[int]
    """The most memory of tensors in use on each device of the process; empty where it was not counted."""
    device: str
    """The name of its device."""
    free_bytes: Sequence[int | None]
    """Memory of the device that was free before the process built the run, and after the steps."""


@dataclass(frozen=True)
class BenchTurn:
    """What a process measured in one turn, the steps that it takes in one round."""

    num_steps: int
    seconds: float
    num_samples: int
    """The samples of all lanes."""
    num_units: float
    """The sum of the weights of all losses: samples, or what a `Loss` counts, such as tokens."""
    phases: dict[str, float]
    """Seconds of each phase, in all steps."""


def steps_of_turn(turns: Sequence[BenchTurn]) -> int:
    """Return how many steps the next turn should have, by the last one of every process."""
    seconds_per_step = max(turn.seconds / turn.num_steps for turn in turns)
    return max(LEAST_STEPS, min(_MOST_STEPS, round(_TURN_SECONDS / seconds_per_step)))


@final
@dataclass(frozen=True)
class BenchJob(Job):
    """Trains in turns; nothing is saved, shown or evaluated.

    Every process connects to the address, and takes as many steps as it is told to.
    """

    address: Path | None = field(default=None, kw_only=True)
    """A socket of this machine; None until it is open."""

    def run(self, world: World) -> None:
        logging.getLogger().setLevel(logging.ERROR)
        measured = _MeasuredRun(self, world)
        assert self.address is not None
        with connect(self.address) as connection:
            send(connection, asdict(measured.first))
            while (num_steps := _receive(connection)) is not None:
                send(connection, asdict(measured.take_turn(num_steps)))


def _receive(connection: "Connection[Any, int]") -> int | None:
    """Wait to be told a number of steps, which is progress; None where nobody is left to tell it."""
    while not connection.poll(_SECONDS_BETWEEN_BEATS):
        heartbeat.num_pieces += 1
    try:
        num_steps: int = receive(connection)
    except (EOFError, OSError):
        return None
    return num_steps


@final
class _MeasuredRun:
    """A run on this process, which has taken its first steps. Collective: every rank must build it."""

    def __init__(self, job: BenchJob, world: World) -> None:
        device = world.device
        before = free_bytes(device, 1)
        task = job.task or build_task(job.config)
        dataset = task.train_dataset()  # whose memory is not counted
        task.train_dataset = lambda: dataset  # type: ignore[method-assign]
        task.eval_datasets = dict  # type: ignore[method-assign]
        # A compiled model runs otherwise while tensors are counted, loader processes would count for ever,
        # and FSDP frees what no operation shows.
        can_count = job.config.compile is None and not job.config.data.num_workers
        can_count = can_count and not job.config.distributed.kind.shards_weights
        live = LiveStorage() if device.type == "cpu" and can_count else None
        with live or nullcontext():
            run = build_run(replace(job.config, evaluate=EvaluateConfig()), world, task)
            devices = [next(replica.parameters()).device for replica in run.reducer.replicas]
            take_peaks = partial(_take_peaks, devices, live)
            self._run, self._steps = run, _steps_without_end(run)
            take_peaks()
            for _ in range(NUM_FIRST_STEPS):
                next(self._steps)
            first_peaks, model = take_peaks(), digest_of(run.training.model)
            take_peaks()  # of parameters that were gathered for the digest
            end = time.monotonic() + _MEMORY_SECONDS
            for _ in range(NUM_FIRST_STEPS, _MEMORY_STEPS):
                if world.broadcast_tree(time.monotonic() > end):
                    break
                next(self._steps)
            peaks = list(map(max, first_peaks, take_peaks()))
        self.first = First(
            rank=world.rank,
            model=model,
            peak_bytes=peaks,
            device=device_name(device),
            free_bytes=(before, free_bytes(device, 1)),
        )

    def take_turn(self, num_steps: int) -> BenchTurn:
        """Take steps. Collective: every rank must call this.

        One step is taken before time is measured: other worlds have used the caches since the last turn, and
        loader processes have read ahead.
        """
        measured = self._run.phases
        num_samples_after = self._run.loader.num_samples_after
        *_, report = islice(self._steps, 1 + self._num_read_ahead)
        measured.take()()
        num_before, num_units, times = num_samples_after(report.step), 0.0, []
        begin = time.perf_counter()
        for report in islice(self._steps, num_steps):
            num_units += report.totals.weight
            if report.interval is not None:
                times.append(report.interval.times)
        times.append(measured.take())
        phases = Counter[str]()
        for read in times:
            phases.update(read().phases)  # waits for the device
        seconds = time.perf_counter() - begin
        num_samples = num_samples_after(report.step) - num_before
        return BenchTurn(num_steps, seconds, num_samples, num_units, dict(phases))

    @property
    def _num_read_ahead(self) -> int:
        """How many steps loader processes may have read meanwhile; the same on every rank."""
        fewest_lanes = max(1, self._run.placement.num_lanes // self._run.world.world_size)
        num_batches = 2 * self._run.config.data.num_workers  # a DataLoader's prefetch_factor is 2
        return -(-num_batches // fewest_lanes)


def _steps_without_end(run: Run) -> Iterator[StepReport]:
    """Take the steps of a run, and go on after its last one, at the learning rate of the last one."""
    interval = LogInterval(run.config.log.every_steps, _ENDLESS)
    run.loader.repeat()
    training = run.training
    if training.scheduler is not None and run.last_step is not None:
        steps = repeat(training.scheduler.step, run.last_step // training.steps_per_value)
        scheduler: Any = SimpleNamespace(step=lambda: [step() for step in islice(steps, 1)])  # or nothing
        training = replace(training, scheduler=scheduler)
    yield from Engine(replace(run, training=training, last_step=_ENDLESS, log_interval=interval)).steps()


def _take_peaks(devices: Sequence[torch.device], live: LiveStorage | None) -> Sequence[int]:
    """Return the most memory in use on each device since the last call; empty where nobody counts it."""
    if devices[0].type == "cpu":
        return [] if live is None else [live.take_peak()]
    peaks = list(map(peak_bytes, devices))
    for device in devices:
        torch.accelerator.reset_peak_memory_stats(device)
    return peaks


def digest_of(model: nn.Module) -> str:
    """Return the digest of parameters and buffers. Collective where they are sharded."""
    tensors = chain(model.named_parameters(), model.named_buffers())
    return digest([(name, digest(whole(tensor))) for name, tensor in tensors])
