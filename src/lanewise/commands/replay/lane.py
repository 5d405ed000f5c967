"""Runs one lane of a step of a run again, alone where its loss is its own."""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pdb import Pdb
from typing import Any

import torch

from lanewise.commands.replay.replay import Replay, ReplayJob
from lanewise.data import LaneBatch, LaneReader
from lanewise.engine.buffers.pack import kept_buffers
from lanewise.engine.run.run import Run
from lanewise.engine.step.lanes import StepBatches, to_device
from lanewise.engine.step.terms import LaneLoss
from lanewise.errors import ConfigError
from lanewise.lanes import LaneTurn, lane_seed
from lanewise.processes.device.nested import copied, map_leaves, tensors_in
from lanewise.processes.device.random_state import set_random_state
from lanewise.processes.world.digests import digests_of
from lanewise.processes.world.world import World


@dataclass(frozen=True)
class ReplayedLane:
    """What a lane gave when it was run again."""

    step: int
    """From 1."""
    lane: int
    samples: Sequence[int]
    """Dataset indices; of a stream the numbers of the samples."""
    loss: float
    """Mean over its units; NaN of a lane that does not tell the loss of all lanes."""
    weight: float
    scale: float
    """The loss scale, by which the gradients are multiplied."""
    digests: Mapping[str, str]
    """Of the gradient of each parameter that the lane reaches, as it enters the tree."""
    norms: Mapping[str, float]
    """L2 norms of these gradients."""
    of_samples: Sequence[tuple[int, float]]
    """Each sample and its loss alone: another computation than the lane's."""
    why_none: str = ""
    """Why no sample can be computed alone."""
    tensors: Mapping[str, Any] = field(default_factory=dict)
    """`model`, `batch`, `outputs` and `gradients`, where they were asked for."""


@dataclass(frozen=True, kw_only=True)
class LaneJob(ReplayJob):
    """Takes the steps before the plan's last one again, then a lane of that; returns a `ReplayedLane`."""

    lane: int
    keeps: bool = False
    """Whether the result has `tensors`."""
    debugs: bool = False
    """Whether a debugger stops before the lane's forward."""

    def run(self, world: World) -> Any:
        logging.getLogger().setLevel(logging.ERROR)
        with closing(Replay(self.plan, world, self.folder)) as replay:
            while replay.num_taken < self.plan.step - 1:
                replay.take()
            found = replay_lane(replay, self.lane, keeps=self.keeps, debugs=self.debugs)
            if world.world_size > 1:  # one process has it
                told = world.all_gather_tree(None if found is None else vars(found))
                found = next(ReplayedLane(**of_rank) for of_rank in told if of_rank is not None)
            return found


def replay_lane(
    replay: Replay, lane: int, *, keeps: bool = False, debugs: bool = False
) -> ReplayedLane | None:
    """Run a lane of the next step; None on the processes that do not carry it. Collective.

    Raises:
        ConfigError: if the lane has no samples in the step, or forwards are collective.
    """
    replay.enter()
    run, pass_, step = replay.engine.run, replay.engine.step.pass_, replay.num_taken
    if run.reducer.forward_is_collective:
        raise ConfigError(
            "a lane cannot run alone under fsdp. Leave distributed.reducer out: the bytes are equal."
        )
    runner, model, message = run.training.runner, run.reducer.model, pass_.message
    kept = StepBatches(iter(to_device(replay.batches, run.world.device)))
    pass_.begin(step)
    if lane not in kept.turn.present:
        lanes = ", ".join(map(str, kept.turn.present))
        raise ConfigError(f"lane {lane} has no samples in step {step + 1}. Name one of the lanes {lanes}.")
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()} if keeps else {}
    batch = next((batch for batch in kept if batch.turn.lane == lane), None)
    tensors: dict[str, Any] = {}
    if batch is not None and debugs:
        with kept_buffers([model]), runner.precision.forward():
            set_random_state(lane_seed(runner.seed, step, lane))
            Pdb().runcall(runner.task.forward, model, copied(batch.data))
    if batch is not None and keeps:
        with kept_buffers([model]):
            outputs = runner.lane(batch).forward(model, copied(batch.data))
        tensors = {"model": state, "batch": copied(batch.data), "outputs": outputs}
    found: LaneLoss | None = None
    gradients: dict[str, torch.Tensor] = {}
    for turn, loss in _losses(replay, kept, lane):
        if turn.lane == lane:
            found, (root, factor) = loss, loss.root(turn, message.scale)
            trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
            made: Sequence[Any] = [None] * len(trained)
            if root is not None:
                made = torch.autograd.grad(root, [*trained.values()], factor, allow_unused=True)
            gradients = {name: one for name, one in zip(trained, made, strict=True) if one is not None}
    if batch is None or found is None:
        return None
    of_samples, why_none = _samples_alone(run, batch)
    return ReplayedLane(
        step=step + 1,
        lane=lane,
        samples=batch.indices,
        loss=found.sum.item() / found.weight if found.sum is not None and found.weight else math.nan,
        weight=found.weight,
        scale=message.scale,
        digests=digests_of(gradients),
        norms={name: float(torch.linalg.vector_norm(one)) for name, one in gradients.items()},
        of_samples=of_samples,
        why_none=why_none,
        tensors={**map_leaves(torch.Tensor.detach, tensors), "gradients": gradients} if keeps else {},
    )


def _losses(replay: Replay, kept: StepBatches, lane: int) -> Iterator[tuple[LaneTurn, LaneLoss]]:
    """Yield the loss of a lane, if this process has it, and of others that it depends on. Collective."""
    step, runner, model = replay.engine.step, replay.engine.training.runner, replay.engine.reducer.model
    message, rank = step.pass_.message, replay.engine.run.world.rank
    if runner.loss_method != "loss" or runner.has_several_losses:
        for work, returned in step.losses.of(iter(kept)):  # with all forwards, and their exchange
            batch = work.batch
            loss = (
                returned if isinstance(returned, LaneLoss) else LaneLoss.of(returned, batch.num_samples, "")
            )
            message.add(batch, loss)
            yield batch.turn, loss
        return
    if message.loss_scale is not None and not message.loss_scale.has_unit:
        with kept_buffers([model]):  # the first lane of rank 0 gives it
            weight = 0.0 if rank else runner.lane(next(kept.copies())).run(model).weight
            message.agree_on_unit(weight)
    for batch in kept.copies():
        if batch.turn.lane == lane:
            with kept_buffers([model]):
                yield batch.turn, runner.lane(batch).run(model)


def _samples_alone(run: Run, batch: LaneBatch) -> tuple[list[tuple[int, float]], str]:
    """Return each sample of a lane with its loss alone, or why there is none: BatchNorm needs several."""
    runner, model, found = run.training.runner, run.reducer.model, list[tuple[int, float]]()
    try:
        for one in to_device(_cut(run, batch), run.world.device):
            with kept_buffers([model]):
                loss = runner.lane(one).run(model)
            if loss.sum is not None and loss.weight:
                found.append((one.indices[0], loss.sum.item() / loss.weight))
    except Exception as error:  # noqa: BLE001 - code of the user's, for a batch that it may not be made for
        return [], str(error).splitlines()[0]
    return found, "" if found else "the samples of this stream are no rows of tensors"


def _cut(run: Run, batch: LaneBatch) -> Iterator[LaneBatch]:
    """Yield a batch for each sample: read again by its index; of a stream the rows of its tensors."""
    reader, count = run.loader.reader, batch.num_samples
    if isinstance(reader, LaneReader):
        for index in batch.indices:
            yield reader[batch.turn, (index,)]
    elif all(tensor.shape[:1] == (count,) for tensor in tensors_in(batch.data)):
        for row, number in enumerate(batch.indices):
            data = map_leaves(itemgetter(slice(row, row + 1)), batch.data)
            yield replace(batch, indices=(number,), num_samples=1, data=data)
