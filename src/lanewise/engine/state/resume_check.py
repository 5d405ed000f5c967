"""The identity of a run, by which a checkpoint of another run is recognised."""

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any

from lanewise.config import DistributedConfig, RunConfig, SchedulerConfig
from lanewise.config.check import Section
from lanewise.config.optimizer_rules import follows_evaluation
from lanewise.processes.device.determinism import exact_pins
from lanewise.processes.world.world import World


def identify(
    config: RunConfig, dataset: Mapping[str, Any], world: World, num_steps: int | None
) -> dict[str, Any]:
    """Return the identity of a run: a checkpoint with another value of one of these is of another run.

    Args:
        config: the run, with the modes of its values.
        dataset: the identity of its samples and their order.
        world: the processes.
        num_steps: the number of steps of the whole run; None where only the data tells.
    """
    scheduler, early_stopping = config.scheduler, config.evaluate.early_stopping
    best, compiled, optimizer = config.evaluate.best, config.compile, config.optimizer
    return {
        "lanes": asdict(config.batch),
        "dataset": dataset,
        "seed": config.train.seed,
        "exact": identify_exact(config.distributed, world),
        "precision": config.precision,
        # Compiled modules round differently from eager ones, which matters only in exact.
        "compile": None if config.distributed.equality == "close" or compiled is None else asdict(compiled),
        # A restored state replaces the arguments of the object, so others have an effect only if allowed.
        "optimizer": {name: value for name, value in plain(optimizer).items() if value or name in _ALWAYS},
        "scheduler": None if scheduler is None else _identify_scheduler(config, scheduler, num_steps),
        "num_steps": None if scheduler is None or not scheduler.knows_length else num_steps,
        "max_grad_norm": config.train.max_grad_norm,
        "ema_decay": config.train.ema_decay,
        "best": None if best is None else {"value": best, "mode": config.evaluate.best_mode},
        "early_stopping": early_stopping and asdict(early_stopping),
        "task": plain(config.task),
        "init_from": config.train.init_from and plain(config.train.init_from),
    }


def _identify_scheduler(
    config: RunConfig, scheduler: SchedulerConfig, num_steps: int | None
) -> dict[str, Any]:
    """Return the identity of a run's scheduler, with the value that it follows, if it follows one."""
    if scheduler.name is not None:
        usual = asdict(SchedulerConfig(name=scheduler.name))  # which checkpoints of earlier versions lack
        known = ("name", "warmup", "decay")
        return {key: value for key, value in asdict(scheduler).items() if key in known or value != usual[key]}
    identity = {} if scheduler.of_class is None else plain(scheduler.of_class)
    if scheduler.interval != "step":  # which checkpoints of earlier versions lack
        identity["interval"] = scheduler.interval
    if scheduler.warmup:  # the scheduler's state does not have the fraction
        identity["warmup"] = scheduler.warmup_steps(num_steps or 0)
    if follows_evaluation(scheduler):
        identity["follows"] = {"value": config.evaluate.best, "mode": config.evaluate.best_mode}
    return identity


def identify_exact(distributed: DistributedConfig, world: World) -> dict[str, Any] | None:
    """Return the settings on which equal bytes depend; None in `close`, which does not promise them."""
    if distributed.equality != "exact":
        return None
    return {"threads": distributed.threads, "random_numbers": _RANDOM_NUMBERS, **exact_pins(world.device)}


_ALWAYS = ("class_path", "init_args")
"""What the identity of an optimizer has even if it is empty; of other keys, earlier versions lack some."""
_RANDOM_NUMBERS = 2
"""Version of the rule by which random numbers follow from the seed (docs/decisions/0015-seed-always.md)."""


def compare(
    current: Mapping[str, Any], saved: Mapping[str, Any], allow: Collection[str]
) -> tuple[list[str], list[str]]:
    """Compare a run's identity with a checkpoint's; return the differences that are errors, and allowed ones.

    Four differences are always allowed, and only reported. If `best` or `early_stopping` differs, the search
    for the best value starts anew, which changes no step. If the arguments of the task differ, it is unknown
    whether they change the model or only the location of the data. A run that goes on reads no `init_from`.
    """
    mistakes: list[str] = []
    allowed: list[str] = []
    for name in sorted(current.keys() | saved.keys()):
        mine, theirs = current.get(name), saved.get(name)
        if name == "exact" and mine and theirs:
            mine = {pin: mine[pin] for pin in mine if pin != "onednn" or pin in theirs}  # 0.2.0 lacks it
        if mine != theirs:
            (allowed if name in (*allow, *_ONLY_TOLD) else mistakes).append(
                f"{name} was {theirs}, and is {mine} now{_WHY.get(name, '')}"
            )
    return mistakes, allowed


_ONLY_TOLD = ("best", "early_stopping", "init_from", "task")
WHY_LENGTH = (
    ": the learning rate of a step by the scheduler, or what the task makes of self.progress, depends on it"
)
_WHY = {"num_steps": WHY_LENGTH, "optimizer": ": --allow optimizer sets its options and keeps its state"}


def plain(config: Section) -> dict[str, Any]:
    """Return a section, such as a class and its arguments, as it is read back from JSON."""
    plain: dict[str, Any] = json.loads(json.dumps(asdict(config), default=str))
    return plain
