"""Takes a few steps of a run, and records what they computed."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from lanewise.commands.recording.comparison import Recording, differing
from lanewise.commands.recording.recorder import StepRecorder, tensor_digests
from lanewise.data import LaneSource
from lanewise.engine.engine import Engine
from lanewise.engine.step.update import Training
from lanewise.engine.transforms import compare_runs
from lanewise.lanes import Schedule
from lanewise.processes.world.world import World
from lanewise.reduce import kept_gradients

BUFFER = "buffer "
"""The beginning of the name of every buffer in `Trace.at_checkpoint`."""
CHECKS = ("samples", "inputs", "loss", "gradients", "weights", "buffers", "optimizer", "evaluation")
"""The parts of a recording that must be equal, in the order in which a step computes them."""


@dataclass
class Trace:
    """Some steps and what they computed; equal for equal runs."""

    steps: dict[int, dict[str, Mapping[Any, Any]]] = field(default_factory=dict)
    """The recording of each, by number, from 1. The last one has the `evaluation` after it. `otherwise` names
    what `Task.before_update` or `after_update`, the key, made something else of when it ran again."""
    hidden: dict[str, str] = field(default_factory=dict)
    """Digests of values outside of parameters and buffers at the end; they may differ."""
    at_checkpoint: dict[str, str] = field(default_factory=dict)
    """Digests of buffers and of such values where the run saved, or as it goes on from there."""
    changed: list[str] = field(default_factory=list)
    """Names of such values, of the model and the task, that the steps changed."""


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


def run_steps(engine: Engine, world: World, steps: Sequence[int]) -> Iterator[tuple[int, Recording]]:
    """Take these steps one after the other, and yield each, from 1, with its recording.

    Collective: every rank must call this.
    """
    pass_ = engine.step.pass_
    pass_.looks[:] = [look for look in pass_.looks if not look.verify_does_more]
    recorder = StepRecorder(engine, world)
    for step in steps:
        if engine.run.loader.is_over:
            return
        compare_runs(engine.reducer.replicas, is_on=True)  # a run does it in its first step
        yield step + 1, recorder.take(step, engine.run.loader.batches(step, step + 1))[0]


def run_twice(training: Training, otherwise: dict[str, list[str]]) -> Training:
    """Let what a task does around an update run twice from the same state, and note what differs."""
    model = training.model

    def tensors() -> dict[str, torch.Tensor]:
        return {**dict(model.named_parameters()), **dict(model.named_buffers())}

    def digests() -> dict[str, str]:
        named = ((name, weight.grad) for name, weight in model.named_parameters())
        gradients = {f"gradient of {name}": gradient for name, gradient in named if gradient is not None}
        return tensor_digests((tensors() | gradients).items())

    def twice(method: str, run: Callable[[Any], None] | None) -> Callable[[Any], None] | None:
        def update(gradient: Any) -> None:
            assert run is not None
            kept = {name: tensor.detach().clone() for name, tensor in tensors().items()}
            put_back = kept_gradients(model.parameters())
            run(gradient)
            first = digests()
            with torch.no_grad():
                for name, tensor in tensors().items():
                    tensor.copy_(kept[name])
            put_back()
            run(gradient)
            if different := [*differing(first, digests())]:
                otherwise[method] = different

        return None if run is None else update

    return replace(
        training,
        before_update=twice("before_update", training.before_update),
        after_update=twice("after_update", training.after_update),
    )
