"""Builds the optimizer and the learning rate scheduler, and knows which of them can be used."""

import inspect
from dataclasses import replace
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LinearLR, LRScheduler, SequentialLR

from lanewise.config import ClassConfig, RunConfig
from lanewise.config.class_path import resolve_class
from lanewise.config.classes import build
from lanewise.errors import ConfigError, TaskError
from lanewise.task import Task


def build_optimizer(config: RunConfig, task: Task, model: nn.Module) -> tuple[Optimizer, LRScheduler | None]:
    """Build the optimizer over the task's parameter groups, and the scheduler over the optimizer.

    Raises:
        ConfigError: if a class is not what its section needs, or cannot be used for training here.
        TaskError: if a parameter of the optimizer is not in the model.
    """
    section = config.optimizer
    is_on_gpu = any(parameter.device.type != "cpu" for parameter in model.parameters())
    if (
        config.distributed.equality == "exact"
        and is_on_gpu
        and not {"foreach", "fused"} & section.init_args.keys()
    ):
        # By default torch updates plain parameters with other kernels than sharded ones.
        parameters = inspect.signature(resolve_class("optimizer", section)).parameters
        if "foreach" in parameters:
            section = replace(section, init_args={**section.init_args, "foreach": True})
    optimizer: Optimizer = _build("optimizer", section, task.parameter_groups(model))
    own = set(model.parameters())
    for parameter in (one for group in optimizer.param_groups for one in group["params"]):
        if parameter not in own:
            raise TaskError(
                f"a parameter of the optimizer, of shape {tuple(parameter.shape)}, is not in the model: "
                "its gradient would not be summed over the lanes, and it would not be saved. Make it part of "
                "the module that build_model returns."
            )
    return optimizer, _build_scheduler(config, optimizer)


def _build(key: str, section: ClassConfig, argument: object) -> Any:
    """Build an object, and name the section where its class refuses a value, as torch does lr=-1."""
    try:
        return build(key, section, argument)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{key}: {section.class_path} refuses its arguments: {error}.") from error


def _build_scheduler(config: RunConfig, optimizer: Optimizer) -> LRScheduler | None:
    """Build the scheduler, after a warm-up if there is one."""
    steps = config.train.warmup_steps
    scheduler: LRScheduler | None = None
    if config.scheduler is not None:
        scheduler = _build("scheduler", config.scheduler, optimizer)
    if steps is None:
        return scheduler
    warmup = LinearLR(optimizer, start_factor=1 / (steps + 1), total_iters=steps)
    return warmup if scheduler is None else SequentialLR(optimizer, [warmup, scheduler], [steps])


def require_enough_steps(config: RunConfig, scheduler: LRScheduler | None, last_step: int) -> None:
    """Raise before the first step where a scheduler would refuse the last ones, as OneCycleLR does.

    Raises:
        ConfigError: if the run takes more steps than the scheduler has.
    """
    if isinstance(scheduler, SequentialLR):
        scheduler, last_step = scheduler._schedulers[-1], last_step - (config.train.warmup_steps or 0)  # noqa: SLF001
    total_steps = getattr(scheduler, "total_steps", None)
    if isinstance(total_steps, int) and total_steps < last_step:
        raise ConfigError(
            f"the scheduler ends after {total_steps} steps, and the run takes {last_step}: "
            f"use --scheduler.init_args.total_steps {last_step}."
        )
