"""What identifies a run, so that a checkpoint of another run is recognised."""

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any

from lanewise.config import ClassConfig, DistributedConfig, RunConfig, SchedulerConfig
from lanewise.config.optimizer import follows_evaluation
from lanewise.device.determinism import exact_pins
from lanewise.world.world import World


def identify(config: RunConfig, dataset: Mapping[str, Any], world: World, num_steps: int) -> dict[str, Any]:
    """Return what identifies a run: with another value of these, checkpoints belong to another run.

    Args:
        config: the run.
        dataset: what identifies its samples and their order.
        world: the processes.
        num_steps: those of the whole run.
    """
    scheduler, early_stopping = config.scheduler, config.evaluate.early_stopping
    best, compiled = config.evaluate.best, config.compile
    return {
        "lanes": asdict(config.batch),
        "dataset": dataset,
        "seed": config.train.seed,
        "exact": identify_exact(config.distributed, world),
        "precision": config.precision,
        # Compiled and eager modules round otherwise; in close that is all there is to it.
        "compile": None if config.distributed.equality == "close" or compiled is None else asdict(compiled),
        # Their state replaces their arguments, so other arguments would have no effect.
        "optimizer": plain(config.optimizer),
        "scheduler": None if scheduler is None else _identify_scheduler(config, scheduler, num_steps),
        # What a named scheduler makes of each step depends on it.
        "num_steps": None if scheduler is None or scheduler.name is None else num_steps,
        "max_grad_norm": config.train.max_grad_norm,
        "ema_decay": config.train.ema_decay,
        "best": None if best is None else {"value": best, "mode": config.evaluate.best_mode},
        "early_stopping": None if early_stopping is None else asdict(early_stopping),
        "task": plain(config.task),
    }


def _identify_scheduler(config: RunConfig, scheduler: SchedulerConfig, num_steps: int) -> dict[str, Any]:
    """Say which scheduler a run has, and which value it follows, if it follows one."""
    if scheduler.name is not None:
        of_class = ("class_path", "init_args")
        return {key: value for key, value in asdict(scheduler).items() if key not in of_class}
    identity = {} if scheduler.of_class is None else plain(scheduler.of_class)
    if scheduler.warmup:  # its state knows no fraction
        identity["warmup"] = scheduler.warmup_steps(num_steps)
    if follows_evaluation(scheduler):
        identity["follows"] = {"value": config.evaluate.best, "mode": config.evaluate.best_mode}
    return identity


def identify_exact(distributed: DistributedConfig, world: World) -> dict[str, Any] | None:
    """Say what equal bytes depend on; None where they are not promised."""
    if distributed.equality != "exact":
        return None
    return {
        "threads": distributed.threads,
        "random_numbers": _RANDOM_NUMBERS,
        **exact_pins(world.device),
    }


_RANDOM_NUMBERS = 2
"""Counts the ways in which random numbers followed from the seed (docs/decisions/0015-seed-always.md)."""


def compare(
    current: Mapping[str, Any], saved: Mapping[str, Any], allow: Collection[str]
) -> tuple[list[str], list[str]]:
    """Compare a run's identity with a checkpoint's; return the differences, allowed ones separately.

    Some are always allowed, and only told: the best value is looked for anew where it is another one, as is
    that of early stopping, which changes no step; and of a task's arguments nobody knows which change the
    model and which say where the data are.
    """
    mistakes: list[str] = []
    allowed: list[str] = []
    for name in sorted(current.keys() | saved.keys()):
        mine, theirs = current.get(name), saved.get(name)
        if mine != theirs:
            (allowed if name in (*allow, *_ONLY_TOLD) else mistakes).append(
                f"{name} was {theirs}, and is {mine} now{_WHY.get(name, '')}"
            )
    return mistakes, allowed


_ONLY_TOLD = ("best", "early_stopping", "task")
_WHY = {"num_steps": ": the learning rate that scheduler.name gives a step depends on the run's length"}


def plain(config: ClassConfig) -> dict[str, Any]:
    """Return a class and its arguments as JSON gives them back."""
    plain: dict[str, Any] = json.loads(json.dumps(asdict(config), default=str))
    return plain
