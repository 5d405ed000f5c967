"""Compares gradients of `close` with the bound that it promises."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from lanewise.commands.verify.trace import run_steps
from lanewise.engine.buffers.pack import kept_buffers
from lanewise.engine.engine import Engine
from lanewise.processes.world.encode import real_view
from lanewise.processes.world.shards import whole
from lanewise.processes.world.world import World

_WEIGHTS = "weights.safetensors"


@dataclass(frozen=True)
class CloseResult:
    """How far the gradients of one layout are from those of one process, from equal weights."""

    worst: float = 0.0
    """The largest difference of an element divided by its bound; at most 1 where the promise holds."""
    place: str = ""
    """The step and the parameter of that element."""
    weights: float = 0.0
    """Largest difference of a weight after the free-running steps; no promise is made about it."""
    num_elements: int = 0
    """How many elements of gradients were compared."""


def write_reference(folder: Path, engine: Engine, world: World, steps: Sequence[int]) -> None:
    """Write the gradients of one process, their bounds, and its weights, to compare others with."""
    for step, gradients in _gradients(engine, steps):
        save_file(gradients, folder / f"gradients-{step}.safetensors")
    trained = [parameter for parameter in engine.training.model.parameters() if parameter.requires_grad]
    # The hook gets the gradient of each lane before that is added to the gradients of earlier lanes.
    hooks = [parameter.register_hook(_absolute) for parameter in trained]
    for step, sums in _gradients(engine, steps):
        save_file(sums, folder / f"sums-{step}.safetensors")
    for hook in hooks:
        hook.remove()
    save_file(_trained(engine, world, steps), folder / _WEIGHTS)


def judge(folder: Path, engine: Engine, world: World, steps: Sequence[int]) -> CloseResult:
    """Compare with the reference. Collective: every rank must call this.

    The bound of an element of a divided gradient is 2 gamma(L) sum_l |g_l| / W: 2 gamma(L-1) for the two
    sums, and one more rounding each for the division by the weight W. See docs/numerics.md.
    """
    worst, place, num_elements, num_lanes = 0.0, "", 0, engine.run.placement.num_lanes
    for step, gradients in _gradients(engine, steps):
        reference = load_file(folder / f"gradients-{step}.safetensors")
        sums = load_file(folder / f"sums-{step}.safetensors")
        for name, gradient in gradients.items():
            unit = torch.finfo(gradient.dtype).eps / 2
            if not gradient.numel() or num_lanes * unit >= 1:
                continue  # so many lanes in so few bits have no bound
            num_elements += gradient.numel()
            gamma = num_lanes * unit / (1 - num_lanes * unit)
            difference = (gradient.double() - reference[name].double()).abs()
            # The sums of absolute values are rounded too, possibly downwards, by at most gamma.
            bound = 2 * gamma * (1 + 2 * gamma) * sums[name].double()
            ratio = torch.where(difference == 0, 0.0, difference / bound).nan_to_num(nan=math.inf)
            if float(ratio.max()) > worst:
                worst, place = float(ratio.max()), f"step {step + 1}, {name}"
    others, weights = load_file(folder / _WEIGHTS), _trained(engine, world, steps)
    differences = [
        (weight.double() - others[name].double()).abs().max()
        for name, weight in weights.items()
        if weight.numel()
    ]
    return CloseResult(worst, place, float(torch.stack(differences).max()), num_elements)


def _trained(engine: Engine, world: World, steps: Sequence[int]) -> dict[str, torch.Tensor]:
    """Take the steps, and return the weights after them, on the CPU. Collective."""
    for _ in run_steps(engine, world, steps):
        pass
    return _on_cpu(engine.training.model.named_parameters())


def _gradients(engine: Engine, steps: Sequence[int]) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
    """Yield each step up to the end of the run with its gradients from the present weights, on the CPU.

    Buffers do not change, and a stream is read from here again afterwards. Collective.
    """
    model, loader, state = engine.training.model, engine.run.loader, engine.run.loader.state
    here = {} if state is None else state.state_dict()
    for step in steps:
        if loader.is_over:
            break
        with kept_buffers([model]):
            engine.step.gradient(step, loader.batches(step, step + 1))
        yield (
            step,
            _on_cpu(
                (name, weight.grad) for name, weight in model.named_parameters() if weight.grad is not None
            ),
        )
    if state is not None:
        state.load_state_dict(here)


def _absolute(gradient: torch.Tensor) -> torch.Tensor:
    """Return absolute values; real and imaginary parts of a complex gradient have bounds of their own."""
    if not gradient.is_complex():
        return gradient.abs()
    return torch.view_as_complex(real_view(gradient).abs())


def _on_cpu(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return tensors that can be saved and compared: complex ones become pairs of real numbers."""
    plain = {name: whole(tensor.detach()).cpu() for name, tensor in named}
    return {
        name: (real_view(tensor) if tensor.is_complex() else tensor).clone(
            memory_format=torch.contiguous_format
        )
        for name, tensor in plain.items()
    }
