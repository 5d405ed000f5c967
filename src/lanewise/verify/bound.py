"""Compares gradients of `close` with the bound that it promises."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from lanewise.config import RunConfig
from lanewise.engine import Engine
from lanewise.engine.clock import StepClock
from lanewise.engine.lane import to_device
from lanewise.engine.passes import LanePasses
from lanewise.lanes import LaneTurn
from lanewise.reduce.reducer import LaneWork, reach_all
from lanewise.verify.trace import run_steps
from lanewise.world.world import World


@dataclass(frozen=True)
class CloseResult:
    """How far the gradients of one layout are from those of one process, from equal weights."""

    worst: float = 0.0
    """The largest difference of an element, as a part of its bound; at most 1 where the promise holds."""
    place: str = ""
    """The step and the parameter of that element."""
    weights: float = 0.0
    """Largest difference of a weight after the free-running steps; no promise is made about it."""


class AbsoluteSum:
    """A reducer of one process that adds up the absolute values of all lanes' gradients."""

    def __init__(self, model: nn.Module) -> None:
        self.replicas: Sequence[nn.Module] = [model]
        self.parameters: Sequence[nn.Parameter] = [
            parameter for parameter in model.parameters() if parameter.requires_grad
        ]
        self._sums: list[torch.Tensor] = []

    def run(self, lanes: Sequence[LaneWork]) -> list[Any]:
        """See `Reducer`."""
        return [lane.run(self.replicas[0]) for lane in lanes]

    def connect(self, turn: LaneTurn, loss_sum: torch.Tensor | None) -> torch.Tensor:
        """See `Reducer`."""
        return reach_all(loss_sum, self.parameters)

    def backward(self, turn: LaneTurn, connected: torch.Tensor) -> None:
        """See `Reducer`."""
        connected.backward()
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad.abs() for p in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        if self._sums:
            torch._foreach_add_(self._sums, gradients)
        else:
            self._sums = gradients

    def finish(self, weight: float) -> None:
        """See `Reducer`."""
        sums, self._sums = self._sums, []
        for parameter, one in zip(self.parameters, sums, strict=True):
            parameter.grad = one.div_(weight)

    def close(self) -> None:
        """See `Reducer`."""


def write_reference(
    folder: Path, engine: Engine, world: World, steps: Sequence[int], config: RunConfig
) -> None:
    """Write what other layouts are compared with: gradients of one process, their bounds, and its weights."""
    training = engine.training
    adding_absolutes = LanePasses(
        AbsoluteSum(training.model),
        world,
        StepClock(world.device),
        num_lanes=config.batch.num_lanes,
        seed=config.train.seed,
        loss_scale=training.precision.loss_scale,
        modules=[[training.model]],
    )
    for step in steps:
        save_file(_gradients(engine, engine.passes, world, step), folder / f"gradients-{step}.safetensors")
        save_file(_gradients(engine, adding_absolutes, world, step), folder / f"sums-{step}.safetensors")
    for _ in run_steps(engine, world, steps):
        pass
    save_file(_on_cpu(training.model.named_parameters()), folder / _WEIGHTS)


def judge(folder: Path, engine: Engine, world: World, steps: Sequence[int], num_lanes: int) -> CloseResult:
    """Compare with the reference. Collective: every rank must call this.

    The bound of an element of a divided gradient is 2 gamma(L) sum_l |g_l| / W: 2 gamma(L-1) for the two
    sums, and one more rounding each for the division by the weight W. See docs/numerics.md.
    """
    worst, place = 0.0, ""
    for step in steps:
        reference = load_file(folder / f"gradients-{step}.safetensors")
        sums = load_file(folder / f"sums-{step}.safetensors")
        for name, gradient in _gradients(engine, engine.passes, world, step).items():
            unit = torch.finfo(gradient.dtype).eps / 2
            gamma = num_lanes * unit / (1 - num_lanes * unit)
            difference = (gradient.double() - reference[name].double()).abs()
            # The sums of absolute values are rounded themselves: by at most gamma, maybe downwards.
            bound = 2 * gamma * (1 + 2 * gamma) * sums[name].double()
            ratio = torch.where(difference == 0, 0.0, difference / bound)
            if float(ratio.max()) > worst:
                worst, place = float(ratio.max()), f"step {step}, {name}"
    for _ in run_steps(engine, world, steps):
        pass
    others = load_file(folder / _WEIGHTS)
    weights = _on_cpu(engine.training.model.named_parameters())
    differences = [(weights[name].double() - others[name].double()).abs().max() for name in weights]
    return CloseResult(worst, place, float(torch.stack(differences).max()))


def _gradients(engine: Engine, passes: LanePasses, world: World, step: int) -> dict[str, torch.Tensor]:
    """Return the gradients of a step from the present weights, on the CPU; leaves the buffers as they are."""
    training = engine.training
    model = training.model
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    task = training.task
    for lanes in passes.groups(to_device(engine.loader.batches(step, step + 1), world.device)):
        passes.backward(passes.run(lanes, task.forward, task.loss, training.precision.forward))
    for name, value in model.named_buffers():
        value.copy_(buffers[name])
    return _on_cpu((name, one.grad) for name, one in model.named_parameters() if one.grad is not None)


def _on_cpu(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: one.detach().cpu().clone(memory_format=torch.contiguous_format) for name, one in named}


_WEIGHTS = "weights.safetensors"
