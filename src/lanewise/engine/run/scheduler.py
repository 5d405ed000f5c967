"""Builds the schedulers of the learning rate: one steps after each step, one after each evaluation."""

import inspect
import math
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LinearLR, LRScheduler, ReduceLROnPlateau, SequentialLR

from lanewise.config import RunConfig, SchedulerConfig
from lanewise.config.optimizer_rules import follows_evaluation
from lanewise.engine.run.optimizer import build_section
from lanewise.engine.step.update import Training
from lanewise.errors import ConfigError
from lanewise.lanes import Schedule


@dataclass(frozen=True)
class Plateau:
    """Lowers the learning rate when the value of `evaluate.best` no longer improves."""

    scheduler: ReduceLROnPlateau
    warmup_steps: int
    """Number of steps in which the learning rate still rises. An evaluation after such a step is ignored."""

    def after_evaluation(self, step: int, value: float) -> None:
        """Step the scheduler with the value of the evaluation after a step; all ranks have the same value."""
        if step >= self.warmup_steps:
            self.scheduler.step(value)


def steps_per_value(config: RunConfig, schedule: Schedule | None) -> int:
    """Return after how many steps the scheduler is stepped: 1, or those of an epoch.

    Raises:
        ConfigError: if only the data tells how long an epoch is.
    """
    if config.scheduler is None or config.scheduler.interval == "step":
        return 1
    if schedule is None:
        raise ConfigError("scheduler.interval epoch needs a dataset with a length: got a stream. Use step.")
    return schedule.steps_per_epoch


def build_scheduler(
    config: RunConfig, optimizer: Optimizer, num_steps: int | None
) -> tuple[LRScheduler | None, Plateau | None]:
    """Build the schedulers that step after each optimizer step, and after each evaluation; None for no such.

    Args:
        config: the run.
        optimizer: the optimizer whose learning rate changes.
        num_steps: the number of steps of the whole run, or of its epochs where the scheduler is stepped after
            each of them; None where only the data tells.

    Raises:
        ConfigError: if the class is not a scheduler or refuses its arguments, or the run has too few steps
            for a named scheduler, too many for one that ends, as OneCycleLR does, or a length that nobody
            knows and the scheduler needs.
    """
    section = config.scheduler
    if section is None:
        return None, None
    if num_steps is None:
        _require_no_length(section)
        num_steps = 0
    if section.name is not None:
        return LambdaLR(optimizer, named_factor(section, num_steps)), None
    num_warmup, of_class = section.warmup_steps(num_steps), section.of_length(num_steps)
    scheduler: LRScheduler | None = None
    plateau: Plateau | None = None
    if of_class is not None and follows_evaluation(section):
        best, mode = config.evaluate.best, config.evaluate.best_mode
        known = {} if mode is None else {"mode": mode}  # `bench` does not evaluate
        of_class = replace(of_class, init_args={**known, **of_class.init_args})
        plateau = Plateau(build_section("scheduler", of_class, optimizer), num_warmup)
        if (own := plateau.scheduler.mode) != mode and known:
            raise ConfigError(
                f"scheduler.init_args.mode contradicts evaluate.best_mode: got {own} and {mode} for {best}. "
                "Leave mode out, or set evaluate.best_mode too."
            )
    elif of_class is not None:
        scheduler = build_section("scheduler", of_class, optimizer)
        _require_step_scheduler(scheduler, of_class.class_path)
        _require_enough_steps(scheduler, num_steps - num_warmup)
    if not num_warmup:
        return scheduler, plateau
    warmup = LinearLR(optimizer, start_factor=1 / (num_warmup + 1), total_iters=num_warmup)
    after = warmup if scheduler is None else SequentialLR(optimizer, [warmup, scheduler], [num_warmup])
    return after, plateau


def _require_no_length(section: SchedulerConfig) -> None:
    """Raise ConfigError if a learning rate depends on the length of the run."""
    if section.knows_length or isinstance(section.warmup, float):
        what = section.name or section.class_path or f"warmup {section.warmup}"
        raise ConfigError(
            f"the scheduler ({what}) needs the number of steps of the run, and the dataset is a stream, "
            "whose epochs end when they end. Set train.max_steps in place of train.epochs."
        )


def named_factor(section: SchedulerConfig, num_steps: int) -> Callable[[int], float]:
    """Return the function from a step to the factor of the learning rate in it.

    The factor rises over the first steps and falls over the last ones; it would reach `min_lr_factor` in the
    step after the last one. For example, where that is 0, a run of six steps with a warm-up of two, and for
    wsd a decay of two:

        step      0     1     2     3     4     5
        linear   1/3   2/3    1    3/4   1/2   1/4
        wsd      1/3   2/3    1     1     1    1/2

    The factor depends on the step alone, so a checkpoint holds only the step.

    Args:
        section: a scheduler with a name.
        num_steps: the number of steps of the whole run.

    Raises:
        ConfigError: if the run has too few steps.
    """
    floor, cycles = section.min_lr_factor, section.num_cycles
    warmup = section.warmup_steps(num_steps)
    decay = section.decay_steps(num_steps) if section.name == "wsd" else num_steps - warmup
    if warmup + max(0, decay) > num_steps or (cycles > 1 and decay < cycles):
        what = f"scheduler.warmup of {warmup}"
        if section.name == "wsd":
            what += f" and scheduler.decay of {decay}"
        if cycles > 1:
            what = f"scheduler.num_cycles of {cycles} and {what}"
        raise ConfigError(
            f"{what} steps must fit into the run: got a run of {num_steps} steps. "
            "Give a part of the run in place of a number of steps, such as 0.05, or train longer."
        )

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        if step < num_steps - decay:
            return 1.0
        since = step - (num_steps - decay)
        rest = (decay - since * cycles % decay) / decay if step < num_steps else 0.0
        falling = (1 - math.cos(math.pi * rest)) / 2 if section.name == "cosine" else rest
        return floor + (1 - floor) * falling

    return factor


def retake(
    training: Training, groups: Iterable[Any], num_steps: int, kept: Collection[str]
) -> Callable[[dict[str, Any]], None]:
    """Step a new scheduler to where a run is, as the checkpoint's is of another length or other options.

    An option is what the optimizer's constructor or a group names. Else a value of a group is
    state, such as the number of steps that schedule-free optimizers keep there.

    Args:
        training: of the resumed run, not restored yet.
        groups: what the optimizer got.
        num_steps: how many steps were taken.
        kept: the names of the options that stay those of the checkpoint.

    Returns:
        A function that puts the state of the scheduler and the options of the optimizer's groups into a state
        of the run that fits.
    """
    optimizer, scheduler = training.optimizer, training.scheduler
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # no optimizer steps in between
        if scheduler is not None:
            for _ in range(num_steps):
                scheduler.step()
    named: list[Mapping[str, Any]] = [inspect.signature(cls).parameters for cls in type(optimizer).__mro__]
    named += [group for group in groups if isinstance(group, Mapping)]
    options = {"initial_lr"}.union(*named) - {"params", "param_names", *kept}

    def put(saved: dict[str, Any]) -> None:
        if scheduler is not None:
            saved["scheduler"].update(scheduler.state_dict())
        for group, mine in zip(saved["optimizer"]["groups"], optimizer.param_groups, strict=True):
            group.update({name: mine[name] for name in options & mine.keys()})

    return put


def _require_step_scheduler(scheduler: object, class_path: str) -> None:
    """Raise ConfigError if what a function made is not stepped after each optimizer step."""
    if isinstance(scheduler, LRScheduler) and not isinstance(scheduler, ReduceLROnPlateau):
        return
    raise ConfigError(
        f"scheduler.class_path: {class_path} made a {type(scheduler).__name__}, which is not stepped after "
        "each step. Name a function that makes an LRScheduler; for ReduceLROnPlateau name that class."
    )


def _require_enough_steps(scheduler: LRScheduler, num_steps: int) -> None:
    """Raise ConfigError before the first step if the scheduler would fail in the last ones."""
    total_steps = getattr(scheduler, "total_steps", None)
    if isinstance(total_steps, int) and total_steps < num_steps:
        raise ConfigError(
            f"the scheduler ends after {total_steps} steps, and the run takes {num_steps}: use "
            "--scheduler.init_args.total_steps auto, which is the length of the run. A run that was begun "
            f"with a number continues for at most {total_steps} steps."
        )
