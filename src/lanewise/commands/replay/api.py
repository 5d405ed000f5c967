"""`lanewise.replay`: a lane of a step again, from a script or a notebook."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lanewise.commands.jobs.start import start
from lanewise.commands.replay.lane import LaneJob, ReplayedLane
from lanewise.commands.replay.plan import plan_replay
from lanewise.config.class_path import add_search_path, is_of_script, refuse_in_import
from lanewise.config.classes import build, check_classes
from lanewise.errors import LaunchError, raised_at_call
from lanewise.processes.world.environment import require_no_world
from lanewise.task import Task


@dataclass(frozen=True)
class LaneReplay:
    """What `replay` returns, on the CPU."""

    model: nn.Module
    """With the weights and buffers with which the lane began, in training mode."""
    batch: Any
    """What `collate` made of the samples."""
    outputs: Any
    """What the forward gave."""
    gradients: Mapping[str, torch.Tensor]
    """Of each parameter that the lane reaches, as they enter the sum."""
    found: ReplayedLane
    """Samples, loss, weight and digests."""


@raised_at_call
def replay(
    run_dir: str | Path, step: int, lane: int, *, task: Task | None = None, trust: bool = False
) -> LaneReplay:
    """Run one lane of a step of a run again, in a fresh process, as `lanewise replay` does.

    Args:
        run_dir: of the run, which may go on meanwhile.
        step: from 1.
        lane: from 0.
        task: None: built again from the arguments that the run noted, if they are plain values.
        trust: whether code that lies in the run directory may run.

    Raises:
        CheckpointError: if there is no such step, or equal bytes cannot be computed here.
        ConfigError: if there is no such lane, or code that came with the run would run.
        LanewiseError: what the process raised; a LaunchError where that is no error of ours.
    """
    refuse_in_import("lanewise.replay")
    require_no_world("replay starts its own process")
    plan = plan_replay(Path(run_dir), step, task=task, trust=trust)
    with LaneJob.of(plan, observed=(), lane=lane, keeps=True) as job:
        add_search_path(job.config.search_path)
        if task is None:
            check_classes(job.config, untrusted=job.untrusted)
            task = build("task", job.config.task)
        sent = task if job.task or is_of_script(job.config.task) else None
        try:
            found: ReplayedLane = start(replace(job, task=sent), is_fresh=True)
        except LaunchError as error:
            raise error.cause or error from None
    tensors = dict(found.tensors)
    model = task.build_model()
    model.load_state_dict(tensors.pop("model"))
    return LaneReplay(model, **tensors, found=replace(found, tensors={}))
