"""What an optimizer holds, found by letting it update fake parameters."""

import inspect
from dataclasses import replace
from typing import Literal, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer

from lanewise.commands.plan.model import with_tensors
from lanewise.config import OptimizerConfig, RunConfig
from lanewise.config.class_path import resolve
from lanewise.config.optimizer_rules import choose_implementation, needs_closure
from lanewise.engine.run.optimizer import build_optimizer
from lanewise.errors import ConfigError
from lanewise.processes.device.live_storage import LiveStorage
from lanewise.runs.checkpoint.part import share_out
from lanewise.task import Task

Cut = Literal["rows", "whole"]
"""How parameters are shared out: `rows` of each, as fsdp does it; or each one to a process."""


class Update(NamedTuple):
    """What an optimizer needs on each process."""

    state_bytes: int
    """What it keeps from step to step."""
    temporary_bytes: int
    """What it holds besides while it updates."""


def measure_update(
    config: RunConfig,
    task: Task,
    model: nn.Module,
    mode: FakeTensorMode | None,
    device_type: str,
    num_parts: int,
    cut: Cut,
) -> Update:
    """Let the optimizer take two steps on fake parameters.

    Args:
        config: names the optimizer.
        task: gives its parameter groups.
        model: it stays as it is.
        mode: that of its tensors; None if they are real.
        device_type: where the model will be; decides between the optimizer's implementations.
        num_parts: among how many processes parameters are shared out, of which this is the one with most.
        cut: how.

    Raises:
        ConfigError: if the optimizer asks for gradients by itself, or refuses its arguments.
    """
    section = _implementation(config, device_type)

    def part(whole: torch.Tensor) -> torch.Tensor:
        if cut == "whole" or not whole.dim():
            return torch.empty_like(whole)
        return torch.empty((-(-whole.shape[0] // num_parts), *whole.shape[1:]), dtype=whole.dtype)

    with mode or FakeTensorMode(allow_non_fake_inputs=True):
        twin = with_tensors(model, part, makes_buffers=False)
        trained = [parameter for parameter in twin.parameters() if parameter.requires_grad]
        optimizer = build_optimizer(replace(config, optimizer=section), task, twin)
        if needs_closure(type(optimizer), is_asked=section.closure):
            raise ConfigError(
                f"optimizer.class_path: plan cannot tell what {section.class_path} holds, as its steps "
                "depend on the values of the loss. Plan with another optimizer, such as torch.optim.AdamW."
            )
        if cut == "whole":
            own = _largest_part(optimizer, num_parts)
            for group in optimizer.param_groups:
                group["params"] = [parameter for parameter in group["params"] if parameter in own]
        with LiveStorage() as live:
            peak_bytes = 0
            for _ in range(2):  # the first one makes the state
                for parameter in trained:
                    parameter.grad = torch.empty_like(parameter)
                before = live.live_bytes
                live.take_peak()
                optimizer.step()
                peak_bytes = live.take_peak()
            held_bytes = sum(parameter.nbytes for parameter in trained)  # the gradients
            return Update(before - held_bytes, max(0, peak_bytes - before))


def _largest_part(optimizer: Optimizer, num_parts: int) -> set[nn.Parameter]:
    """Return the parameters of the process that updates most of them, as `OptimizerShards` deals them."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    num_bytes = {str(number): parameter.nbytes for number, parameter in enumerate(parameters)}
    parts = share_out(num_bytes, min(num_parts, len(parameters)))  # further ones are empty
    largest = max(parts, key=lambda part: sum(num_bytes[name] for name in part))
    return {parameters[int(name)] for name in largest}


def _implementation(config: RunConfig, device_type: str) -> OptimizerConfig:
    """Return the optimizer's section with the implementation that it has on a device of this type.

    The parameters here are on the CPU, where torch would choose another one by itself.
    """
    section = choose_implementation(config, {device_type}, are_floats=True)
    if device_type == "cpu" or {"foreach", "fused"} & section.init_args.keys():
        return section
    if "foreach" not in inspect.signature(resolve("optimizer", section.of_class)).parameters:
        return section
    return replace(section, init_args={**section.init_args, "foreach": True})
