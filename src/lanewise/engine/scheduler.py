"""Builds what changes the learning rate: after each step, or after each evaluation."""

import inspect
from dataclasses import dataclass, replace

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LinearLR, LRScheduler, ReduceLROnPlateau, SequentialLR

from lanewise.config import ClassConfig, RunConfig
from lanewise.config.class_path import resolve_class
from lanewise.config.optimizer import follows_evaluation
from lanewise.engine.optimizer import build_section
from lanewise.errors import ConfigError


@dataclass(frozen=True)
class Plateau:
    """Lowers the learning rate when the value of `evaluate.best` no longer gets better."""

    scheduler: ReduceLROnPlateau
    warmup_steps: int
    """Steps in which the learning rate still rises: evaluations after one of them tell nothing."""

    def after_evaluation(self, step: int, value: float) -> None:
        """Learn what the evaluation after a step gave. All ranks have the same value, so they do the same."""
        if step >= self.warmup_steps:
            self.scheduler.step(value)


def build_scheduler(config: RunConfig, optimizer: Optimizer) -> tuple[LRScheduler | None, Plateau | None]:
    """Build what is stepped after each optimizer step, and what is stepped after each evaluation.

    Raises:
        ConfigError: if the class is no scheduler, or refuses its arguments.
    """
    steps, section = config.train.warmup_steps, config.scheduler
    scheduler: LRScheduler | None = None
    plateau: Plateau | None = None
    if section is not None and follows_evaluation(section):
        plateau = Plateau(build_section("scheduler", _with_mode(section, config), optimizer), steps or 0)
    elif section is not None:
        scheduler = build_section("scheduler", section, optimizer)
    if steps is None:
        return scheduler, plateau
    warmup = LinearLR(optimizer, start_factor=1 / (steps + 1), total_iters=steps)
    after = warmup if scheduler is None else SequentialLR(optimizer, [warmup, scheduler], [steps])
    return after, plateau


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


def _with_mode(section: ClassConfig, config: RunConfig) -> ClassConfig:
    """Return the section with the mode of the value that the scheduler follows."""
    parameters = inspect.signature(resolve_class("scheduler", section)).parameters
    if "mode" not in parameters and not any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return section
    return replace(section, init_args={"mode": config.evaluate.best_mode, **section.init_args})
