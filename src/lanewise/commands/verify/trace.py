"""Takes a few steps of a run, notes what they computed as digests, and compares two runs."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lanewise.data import LaneBatch, LaneSource, digest
from lanewise.engine.engine import Engine
from lanewise.engine.step.guard.second_run import SecondRun
from lanewise.engine.step.update import Training
from lanewise.engine.transforms import compare_runs
from lanewise.lanes import Schedule
from lanewise.processes.world.shards import whole
from lanewise.processes.world.world import World
from lanewise.reduce import kept_gradients

_Noted = dict[int, tuple[tuple[int, ...], str]]
"""The indices of a lane's samples and the digest of what its forward gets, by lane."""
BUFFER = "buffer "
"""The beginning of the name of every buffer in `Trace.at_checkpoint`."""
CHECKS = ("samples", "inputs", "loss", "gradients", "weights", "buffers", "optimizer", "evaluation")
"""What is compared, in the order in which a step computes it."""


@dataclass
class StepTrace:
    """One step, as all ranks together saw it."""

    step: int
    samples: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Dataset indices of each lane."""
    inputs: dict[int, str] = field(default_factory=dict)
    """Digest of what each lane's forward got."""
    loss: dict[int, tuple[float, ...]] = field(default_factory=dict)
    """Loss sum and weight of each lane, and those of each metric that the loss reports."""
    gradients: dict[str, str] = field(default_factory=dict)
    """Digest of each parameter's gradient, after clipping."""
    weights: dict[str, str] = field(default_factory=dict)
    """Digest of each parameter after the update."""
    buffers: dict[str, str] = field(default_factory=dict)
    optimizer: dict[str, str] = field(default_factory=dict)
    """Options of the optimizer's groups, the learning rate among them, as the update used them."""
    changed_outside: list[str] = field(default_factory=list)
    """Parameters that something other than the optimizer changed."""
    changed_otherwise: dict[str, list[str]] = field(default_factory=dict)
    """What `Task.before_update` or `after_update` made something else of when it ran again from the same
    state, by the name of the method."""


@dataclass
class Trace:
    """Some steps and what they computed; equal for equal runs."""

    steps: list[StepTrace] = field(default_factory=list)
    evaluation: dict[str, float] = field(default_factory=dict)
    hidden: dict[str, str] = field(default_factory=dict)
    """Digests of values outside of parameters and buffers at the end; they may differ."""
    at_checkpoint: dict[str, str] = field(default_factory=dict)
    """Digests of buffers and of such values where the run saved, or as it goes on from there."""
    changed: list[str] = field(default_factory=list)
    """Names of such values, of the model and the task, that the steps changed."""

    def values(self) -> Iterator[tuple[str, str, Mapping[Any, Any]]]:
        """Yield check, place and values, in the order in which they were computed."""
        for step in self.steps:
            for check in CHECKS[:-1]:
                yield check, f"step {step.step + 1}", getattr(step, check)
        yield "evaluation", "", self.evaluation


@dataclass(frozen=True)
class Difference:
    """The first place in which two traces differ in one of `CHECKS`."""

    place: str
    """The step with the lane or the name, such as `step 2, lane 1` or `step 0, head.weight`."""
    values: tuple[Any, Any]
    num_others: int = 0
    """How many more lanes or names differ at this place."""

    def __str__(self) -> str:
        more = f" (and {self.num_others} more)" if self.num_others else ""
        return f"{self.place}{more}"


def compare(reference: Trace, other: Trace) -> dict[str, Difference]:
    """Return the first difference of each check that has one, the earliest one first.

    A trace that begins later is compared from there on.
    """
    num_missing = len(reference.steps) - len(other.steps)
    reference = Trace(reference.steps[num_missing:], reference.evaluation)
    found: dict[str, Difference] = {}
    for (check, place, mine), (_, _, theirs) in zip(reference.values(), other.values(), strict=True):
        # Compared as text, so that a NaN equals itself.
        names = [name for name in {**mine, **theirs} if repr(mine.get(name)) != repr(theirs.get(name))]
        if check not in found and names:
            name = f"lane {names[0]}" if isinstance(names[0], int) else names[0]
            where = ", ".join(filter(None, (place, name)))
            values = (mine.get(names[0]), theirs.get(names[0]))
            found[check] = Difference(where, values, len(names) - 1)
    return found


def choose_steps(schedule: Schedule, num_steps: int, last_step: int) -> list[int]:
    """Return the first steps of the run, and those on both sides of the border between two epochs.

    The last step of the first epoch, which may be partial, is always among them; the next one if the run has
    it, and two steps are asked for.
    """
    num_steps = min(num_steps, last_step)
    epoch_end = schedule.steps_per_epoch - 1
    border = [epoch_end, epoch_end + 1] if num_steps > 1 and epoch_end + 1 < last_step else [epoch_end]
    others = [step for step in range(min(last_step, num_steps + 2)) if step not in border]
    return sorted([*others[: num_steps - len(border)], *border])


def steps_of(loader: LaneSource, num_steps: int, last_step: int | None) -> list[int]:
    """Return the steps of a run that verify takes; of a stream the first ones, which may be fewer."""
    if loader.schedule is not None:
        assert last_step is not None
        return choose_steps(loader.schedule, num_steps, last_step)
    return list(range(num_steps if last_step is None else min(num_steps, last_step)))


def run_steps(
    engine: Engine,
    world: World,
    steps: Sequence[int],
    otherwise: dict[str, list[str]] | None = None,
    batches: Iterator[LaneBatch] | None = None,
) -> Iterator[StepTrace]:
    """Take these steps one after the other, and trace each. Collective: every rank must call this.

    Args:
        engine: takes the steps.
        world: the processes.
        steps: their numbers.
        otherwise: where `run_twice` notes what differed in a step.
        batches: those of these steps; None: the loader reads them.
    """
    otherwise = {} if otherwise is None else otherwise
    model, optimizer = engine.training.model, engine.training.optimizer
    weights = _digests(model.named_parameters())
    trace = StepTrace(-1)

    def look() -> None:
        before = _digests(model.named_parameters())
        trace.changed_outside = [name for name in weights if weights[name] != before[name]]
        gradients = (
            (name, weight.grad) for name, weight in model.named_parameters() if weight.grad is not None
        )
        trace.gradients = _digests(gradients)
        trace.optimizer = _options(optimizer)

    def before_update(_optimizer: Optimizer, arguments: tuple[Any, ...], _: Any) -> Any:
        """Note the gradient; where only a closure gives it, note the first one that the closure gives."""
        this, closure = (*arguments, None)[:2]
        if closure is None or any(weight.grad is not None for weight in model.parameters()):
            look()
            return None

        def look_once() -> Any:
            loss = closure()
            if not trace.optimizer:  # it asks for the first time
                look()
            return loss

        return (this, look_once), {}

    pass_ = engine.step.pass_  # the probes look further, and go on
    pass_.looks[:] = [look for look in pass_.looks if not isinstance(look, SecondRun)]
    handle = optimizer.register_step_pre_hook(before_update)
    try:
        for step in steps:
            if engine.run.loader.is_over:
                return
            trace = StepTrace(step)
            otherwise.clear()
            compare_runs(engine.reducer.replicas, is_on=True)  # a run does it in its first step
            noted: _Noted = {}
            read = engine.run.loader.batches(step, step + 1) if batches is None else batches
            report = engine.take_step(step, _noting(read, noted))
            trace.loss = {lane.lane: lane.numbers for lane in report.totals.lanes}
            weights = trace.weights = _digests(model.named_parameters())
            trace.buffers = _digests(model.named_buffers())
            trace.changed_otherwise = dict(otherwise)
            lanes = sorted(lane for of_rank in world.all_gather_tree(noted) for lane in of_rank.items())
            trace.samples = {lane: indices for lane, (indices, _) in lanes}
            trace.inputs = {lane: inputs for lane, (_, inputs) in lanes}
            yield trace
    finally:
        handle.remove()


def run_twice(training: Training, otherwise: dict[str, list[str]]) -> Training:
    """Let what a task does around an update run twice from the same state, and note what differs."""
    model = training.model

    def twice(method: str, run: Callable[[Any], None] | None) -> Callable[[Any], None] | None:
        def update(gradient: Any) -> None:
            assert run is not None
            kept = {name: tensor.detach().clone() for name, tensor in _tensors(model)}
            put_back = kept_gradients(model.parameters())
            run(gradient)
            first = _digests([*_tensors(model), *_gradients(model)])
            with torch.no_grad():
                for name, tensor in _tensors(model):
                    tensor.copy_(kept[name])
            put_back()
            run(gradient)
            again = _digests([*_tensors(model), *_gradients(model)])
            if different := [name for name in {**first, **again} if first.get(name) != again.get(name)]:
                otherwise[method] = different

        return None if run is None else update

    return replace(
        training,
        before_update=twice("before_update", training.before_update),
        after_update=twice("after_update", training.after_update),
    )


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return chain(model.named_parameters(), model.named_buffers())


def _gradients(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            yield f"gradient of {name}", parameter.grad


def _noting(batches: Iterator[LaneBatch], noted: _Noted) -> Iterator[LaneBatch]:
    """Note each batch, and yield it."""
    for batch in batches:
        if batch.indices:
            noted[batch.turn.lane] = batch.indices, digest(batch.own_data)
        yield batch


def _digests(named: Any) -> dict[str, str]:
    return {name: digest(whole(tensor)) for name, tensor in named}


def _options(optimizer: Optimizer) -> dict[str, str]:
    """Return the options of each parameter group as JSON."""
    return {
        f"{key} of group {number}": json.dumps(
            value,
            default=lambda tensor: tensor.tolist() if isinstance(tensor, torch.Tensor) else repr(tensor),
        )
        for number, group in enumerate(optimizer.param_groups)
        for key, value in group.items()
        if key not in ("params", "param_names")
    }
