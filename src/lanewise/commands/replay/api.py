"""`lanewise.replay`: steps of a run again, or a lane of one, from a script or a notebook."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, overload

import torch
from torch import nn

from lanewise.commands.jobs.api import new_model, start_fresh
from lanewise.commands.replay.lane import LaneJob
from lanewise.commands.replay.plan import plan_replay
from lanewise.commands.replay.report import Compared, ReplayAudit, audit, replay_steps
from lanewise.config.class_path import refuse_in_import
from lanewise.config.classes import build
from lanewise.errors import ConfigError, raised_at_call
from lanewise.processes.world.environment import require_no_world
from lanewise.task import Task

_Lane = tuple[nn.Module, Any, Any, Mapping[str, torch.Tensor]]


@overload
def replay(
    run_dir: str | Path, step: int, lane: int, *, task: Task | None = None, trust: bool = False
) -> _Lane: ...
@overload
def replay(run_dir: str | Path, step: int, *, task: Task | None = None, trust: bool = False) -> Compared: ...
@overload
def replay(
    run_dir: str | Path, *, random: int, seed: int = 0, task: Task | None = None, trust: bool = False
) -> ReplayAudit: ...
@raised_at_call
def replay(
    run_dir: str | Path,
    step: int | None = None,
    lane: int | None = None,
    *,
    random: int | None = None,
    seed: int = 0,
    task: Task | None = None,
    trust: bool = False,
) -> _Lane | Compared | ReplayAudit:
    """Take a step of a run again, a lane of it, or some steps, in fresh processes, as `lanewise replay` does.

    Args:
        run_dir: of the run, which may go on meanwhile.
        step: from 1.
        lane: from 0; None: the whole step, which is compared with what the run wrote of it.
        random: in place of a step, how many to draw, take again and compare.
        seed: of the draw.
        task: None: built again from the arguments that the run noted, if they are plain values. Give it where
            its class is of the script that is running.
        trust: whether code that lies in the run directory may run.

    Returns:
        Of a step, and of several, how they compare: print it, or read its `code`, which is 0 where all is
        equal, 1 where something differs and 2 where nothing tells. Of a lane the model, in training mode,
        with the weights and buffers with which the lane began; the batch; what the forward gave; and the
        gradient of each parameter that the lane reaches, as it enters the sum.

    Raises:
        CheckpointError: if there is no such step, or equal bytes cannot be computed here.
        ConfigError: if there is no such lane, or code that came with the run would run.
        LanewiseError: what the process raised; a LaunchError where that is no error of ours.
    """
    refuse_in_import("lanewise.replay")
    require_no_world("replay starts its own process")
    if (step is None) == (random is None):
        raise ConfigError("replay takes a step, or how many to draw (random). Give one of them.")
    if step is None:
        return audit(Path(run_dir), random or 0, seed, (), task=task, trust=trust)
    plan = plan_replay(Path(run_dir), step, task=task, trust=trust)
    if lane is None:
        return replay_steps(plan, [step])[0]
    with LaneJob.of(plan, lane=lane, keeps=True) as job:
        found = start_fresh(job)["tensors"]
        task = task or build("task", job.config.task)
    model = new_model(task)
    model.load_state_dict(found["model"])
    return model, found["batch"], found["outputs"], found["gradients"]
