"""Trains on streams on one process, and in parts on others, with the state of a checkpoint in between."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lanewise.config import RunConfig
from lanewise.engine.engine import Engine, build_engine
from lanewise.processes.device.determinism import set_determinism
from lanewise.processes.world.world import World
from lanewise.testing import run_distributed
from tests.distributed.tasks import configure, state_bytes


def two_epochs(task: str, **init_args: Any) -> RunConfig:
    """Configure two epochs of a stream in four lanes of two."""
    config = configure(task, num_lanes=4, optimizer="torch.optim.SGD", **init_args)
    return replace(config, train=replace(config.train, max_steps=None, epochs=2))


def train_whole_and_in_parts(configs: Mapping[str, RunConfig]) -> dict[str, tuple[Any, Any]]:
    """Train on one process, and then two steps on two and the rest on one.

    Returns:
        By the name of a configuration, of both ways the bytes of the model and the number of samples.
    """
    whole = run_distributed(_train_part, 1, configs, {}, 0, None)[0]
    first = run_distributed(_train_part, 2, configs, {}, 0, 2)[0]
    states = {name: state for name, (_, _, state) in first.items()}
    rest = run_distributed(_train_part, 1, configs, states, 2, None)[0]
    return {name: (whole[name][:2], rest[name][:2]) for name in configs}


def _train_part(
    world: World,
    configs: Mapping[str, RunConfig],
    states: Mapping[str, Any],
    first_step: int,
    num_steps: int | None,
) -> dict[str, Any]:
    """Go on from states for so many steps; return the models, the numbers of samples and the states."""
    done = {}
    for name, config in configs.items():
        set_determinism("exact", threads=1)
        run = build_engine(config, world).run
        if name in states:
            run.state.restore({**states[name], "stream": json.loads(states[name]["stream"])})
        steps = Engine(run, first_step=first_step).steps()
        for number, _ in enumerate(steps, start=1):
            if number == num_steps:
                break
        state = run.state.take()
        state["stream"] = json.dumps(state["stream"])
        done[name] = state_bytes(run.training.model), run.loader.num_samples_after(0), state
        steps.close()
    return done
