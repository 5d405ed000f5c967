"""What a run is of: that by which a checkpoint of another run is told."""

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any

from lanewise.config import ClassConfig, RunConfig
from lanewise.data import Fingerprint
from lanewise.world.determinism import exact_pins
from lanewise.world.world import World


def identify(config: RunConfig, dataset: Fingerprint, world: World) -> dict[str, Any]:
    """Say what a run is of: with another value of these, its checkpoints mean something else."""
    is_exact = config.distributed.equality == "exact"
    return {
        "lanes": asdict(config.batch),
        "dataset": {
            **dataset._asdict(),
            "shuffle": config.data.shuffle,
            "drop_last": config.data.drop_last,
        },
        "seed": config.train.seed,
        "exact": {"threads": config.distributed.threads, **exact_pins(world.device)} if is_exact else None,
        "precision": config.precision,
        # Their state replaces their arguments, so other arguments would have no effect.
        "optimizer": _plain(config.optimizer),
        "scheduler": None if config.scheduler is None else _plain(config.scheduler),
        "warmup_steps": config.train.warmup_steps,
    }


def compare(
    own: Mapping[str, Any], saved: Mapping[str, Any], allow: Collection[str]
) -> tuple[list[str], list[str]]:
    """Compare what a run and a checkpoint are of; return the differences, those that are allowed apart."""
    mistakes: list[str] = []
    allowed: list[str] = []
    for name in sorted(own.keys() | saved.keys()):
        mine, theirs = own.get(name), saved.get(name)
        if mine != theirs:
            (allowed if name in allow else mistakes).append(f"{name} was {theirs}, and is {mine} now")
    return mistakes, allowed


def _plain(config: ClassConfig) -> dict[str, Any]:
    """Return a class and its arguments as JSON gives them back."""
    plain: dict[str, Any] = json.loads(json.dumps(asdict(config), default=str))
    return plain
