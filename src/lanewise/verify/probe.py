"""The same small piece of work on every process, twice: what differs tells what it depends on."""

import copy
import itertools
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lanewise.config import RunConfig
from lanewise.data import digest, read_turns
from lanewise.engine import build_model, build_task
from lanewise.engine.build import build_loader
from lanewise.engine.lane import LaneLoss, move
from lanewise.lanes import LaneTurn, lane_seed
from lanewise.precision import Precision
from lanewise.random_state import set_random_state
from lanewise.task import Task
from lanewise.verify.hidden import changed, hidden_state
from lanewise.verify.operators import Call, recording
from lanewise.world.world import LocalWorld

_NUM_SAMPLES = 32
_SCAN_SECONDS = 1.0


@dataclass(frozen=True)
class Reads:
    """What reading gave. The digests are of two reads in one process, under the same random state."""

    num_samples: int
    samples: Mapping[int, tuple[str, str]]
    """By dataset index."""
    batch: tuple[str, str]
    """The first lane's micro-batch."""
    changed: Sequence[str]
    """Values outside of parameters and buffers that the second reads changed."""
    batch_of_worker: str | None = None
    """`batch`, read in a loader's process; None where the run has none."""
    others: Mapping[int, str] = field(default_factory=dict)
    """Further samples by index, as many as one second allows."""


@dataclass(frozen=True)
class Passes:
    """What two forwards and backwards of the first lane gave, from equal weights and random state."""

    results: tuple[str, str]
    """Digests of loss and gradients."""
    calls: tuple[Sequence[Call], Sequence[Call]]
    changed: Sequence[str]
    """Values outside of parameters and buffers that a forward changed."""
    changed_parameters: Sequence[str]
    changed_buffers: Sequence[str]

    @property
    def collectives(self) -> list[Call]:
        """Where the forward or the backward talks to other processes."""
        return [call for call in self.calls[0] if call.is_collective]


@dataclass(frozen=True)
class Probe:
    """What one process found."""

    weights: Mapping[str, str]
    """Digests of parameters and buffers as they are built."""
    reads: Reads
    passes: Passes


class Subject:
    """A newly built task with its model, data and first micro-batch: what probes work on.

    Args:
        config: the run.
        device: where to compute.
        lane: whose micro-batch it is, of the first step.
    """

    def __init__(self, config: RunConfig, device: torch.device, lane: int = 0) -> None:
        self.seed = config.train.seed
        self.device = device
        self.task: Task = build_task(config)
        self.model: nn.Module = build_model(self.task, self.seed).to(device)
        self.dataset = self.task.train_dataset()
        alone = LocalWorld(device)  # the datasets of other ranks are compared later, by what was read
        loader, _ = build_loader(self.dataset, self.task.collate, config.batch, config.data, alone, self.seed)
        self.num_samples = loader.schedule.num_samples
        self.reader = loader.reader
        self.precision = Precision(config.precision, device.type)
        self.indices = tuple(loader.order.indices(0, 0, loader.schedule.num_samples_in(0)).tolist())
        """Dataset indices of the first step."""
        self.turn: LaneTurn = next(loader.schedule.turns(range(lane, lane + 1), 0, 1))
        """The lane's turn in it."""
        positions = self.turn.positions
        self.own_indices = self.indices[positions.start : positions.stop]

    def read(self) -> Any:
        """Read and collate the lane's micro-batch, where it is read."""
        return self.reader[self.turn, self.own_indices].data

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return parameters and buffers by name, those that are not in the state dict as well."""
        return {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}

    def to_device(self, data: Any) -> Any:
        """Return a batch on the device."""
        return move(data, self.device)

    def loss(self, data: Any, num_samples: int) -> LaneLoss:
        """Run the forward and the loss of a micro-batch that is on the device."""
        with self.precision.forward():
            returned = self.task.loss(self.task.forward(self.model, data), data)
        return LaneLoss.check(returned, num_samples, f"the loss of {type(self.task).__name__}")

    def gradients(self, data: Any, num_samples: int) -> tuple[LaneLoss, dict[str, torch.Tensor]]:
        """Return the loss of a micro-batch, and the gradient of its sum for every trained parameter."""
        self.model.zero_grad()
        loss = self.loss(data, num_samples)
        if loss.sum is not None:
            loss.sum.backward()
        named = {name: one for name, one in self.model.named_parameters() if one.requires_grad}
        gradients = {
            name: torch.zeros_like(one) if one.grad is None else one.grad for name, one in named.items()
        }
        self.model.zero_grad()
        return loss, gradients


def probe(config: RunConfig, device: torch.device, *, is_reference: bool) -> Probe:
    """Do the work. No collective, unless the task makes one.

    Args:
        config: the run.
        device: where to compute.
        is_reference: whether to read in a loader's process as well, if the run has such, and further samples,
            among which a misplaced one may be found.
    """
    subject = Subject(config, device)
    weights = {name: digest(value) for name, value in subject.tensors().items()}
    reads = _probe_reads(subject)
    passes = _probe_passes(subject)
    if is_reference:
        of_worker = _read_in_worker(subject) if config.data.num_workers else None
        reads = replace(reads, batch_of_worker=of_worker, others=_scan(subject))
    return Probe(weights, reads, passes)


def begin_with(config: RunConfig, device: torch.device, lane: int, cache: Path) -> None:
    """Forget what was compiled, and let a lane's shapes be the first ones that are compiled.

    So every layout meets its lanes in another order than the others, and finds no kernel that they made.

    Args:
        config: the run.
        device: where to compute.
        lane: one of the first step; nothing is computed where it is empty there.
        cache: a folder of this process for what it compiles.
    """
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
    torch.compiler.reset()
    subject = Subject(config, device, lane)
    if subject.own_indices:
        set_random_state(lane_seed(subject.seed, subject.turn.step, lane))
        subject.gradients(subject.to_device(subject.read()), len(subject.own_indices))


def _probe_reads(subject: Subject) -> Reads:
    indices = subject.indices[:_NUM_SAMPLES]
    first = [digest(subject.reader.read(0, (index,))) for index in indices]
    batch = digest(subject.read())
    before = hidden_state(subject.model, dataset=subject.dataset, task=subject.task)
    second = [digest(subject.reader.read(0, (index,))) for index in indices]
    after = hidden_state(subject.model, dataset=subject.dataset, task=subject.task)
    return Reads(
        num_samples=subject.num_samples,
        samples=dict(zip(indices, zip(first, second, strict=True), strict=True)),
        batch=(batch, digest(subject.read())),
        changed=changed(before, after),
    )


def _read_in_worker(subject: Subject) -> str:
    (batch,) = read_turns(subject.reader, [(subject.turn, subject.own_indices)], num_workers=1)
    return digest(batch.data)


def _scan(subject: Subject) -> dict[int, str]:
    end = time.monotonic() + _SCAN_SECONDS
    indices = itertools.takewhile(lambda _: time.monotonic() < end, range(subject.num_samples))
    return {index: digest(subject.reader.read(0, (index,))) for index in indices}


def _probe_passes(subject: Subject) -> Passes:
    model = subject.model
    batch = subject.read()
    state = {name: value.detach().clone() for name, value in subject.tensors().items()}
    parameters = dict(model.named_parameters())
    hidden = hidden_state(model, task=subject.task)
    results, calls = [], []
    changed_hidden: list[str] = []
    changed_state: set[str] = set()
    for _ in range(2):
        data = subject.to_device(copy.deepcopy(batch))  # a forward may change its batch, which it gets once
        set_random_state(lane_seed(subject.seed, subject.turn.step, subject.turn.lane))
        with recording(model) as recorded:
            loss, gradients = subject.gradients(data, len(subject.own_indices))
        results.append(digest(loss.sum, loss.weight, gradients))
        calls.append(recorded)
        if not changed_hidden:
            changed_hidden = changed(hidden, hidden_state(model, task=subject.task))
        for name, value in subject.tensors().items():
            if not torch.equal(value, state[name]):
                changed_state.add(name)
                with torch.no_grad():
                    value.copy_(state[name])
    return Passes(
        results=(results[0], results[1]),
        calls=(calls[0], calls[1]),
        changed=changed_hidden,
        changed_parameters=sorted(changed_state & parameters.keys()),
        changed_buffers=sorted(changed_state - parameters.keys()),
    )
