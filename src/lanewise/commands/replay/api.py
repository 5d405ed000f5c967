"""`lanewise.replay`: a lane of a step again, from a script or a notebook."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lanewise.commands.jobs.api import new_model, start_fresh
from lanewise.commands.replay.lane import LaneJob
from lanewise.commands.replay.plan import plan_replay
from lanewise.config.class_path import refuse_in_import
from lanewise.config.classes import build
from lanewise.errors import raised_at_call
from lanewise.processes.world.environment import require_no_world
from lanewise.task import Task


@raised_at_call
def replay(
    run_dir: str | Path, step: int, lane: int, *, task: Task | None = None, trust: bool = False
) -> tuple[nn.Module, Any, Any, Mapping[str, torch.Tensor]]:
    """Run one lane of a step of a run again, in a fresh process, as `lanewise replay` does.

    Args:
        run_dir: of the run, which may go on meanwhile.
        step: from 1.
        lane: from 0.
        task: None: built again from the arguments that the run noted, if they are plain values. Give it where
            its class is of the script that is running.
        trust: whether code that lies in the run directory may run.

    Returns:
        The model, in training mode, with the weights and buffers with which the lane began; the batch; what
        the forward gave; and the gradient of each parameter that the lane reaches, as it enters the sum.

    Raises:
        CheckpointError: if there is no such step, or equal bytes cannot be computed here.
        ConfigError: if there is no such lane, or code that came with the run would run.
        LanewiseError: what the process raised; a LaunchError where that is no error of ours.
    """
    refuse_in_import("lanewise.replay")
    require_no_world("replay starts its own process")
    plan = plan_replay(Path(run_dir), step, task=task, trust=trust)
    with LaneJob.of(plan, lane=lane, keeps=True) as job:
        found = start_fresh(job)["tensors"]
        task = task or build("task", job.config.task)
    model = new_model(task)
    model.load_state_dict(found["model"])
    return model, found["batch"], found["outputs"], found["gradients"]
