"""Runs one lane of a step of a run again, alone where its loss is its own."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, final

import torch

from lanewise.commands.replay.replay import PlannedJob, Replay
from lanewise.data import LaneBatch, LaneReader, digest
from lanewise.engine.buffers.pack import kept_buffers
from lanewise.engine.run.run import Run
from lanewise.engine.step.lanes import StepBatches, to_device
from lanewise.engine.step.terms import LaneLoss
from lanewise.errors import ConfigError, text_of
from lanewise.lanes import LaneTurn
from lanewise.processes.device.nested import copied, map_leaves, tensors_in
from lanewise.processes.world.digests import digests_of
from lanewise.processes.world.world import World


@final
@dataclass(frozen=True, kw_only=True)
class LaneJob(PlannedJob):
    """Takes the steps before the plan's last one again, then a lane of that; returns a mapping.

    `samples`: dataset indices, of a stream their numbers. `loss`: the mean over its units, where it has none
    the sum, NaN where another lane tells the loss of all; `weight`. `digests` and `norms` of the gradient of
    each parameter that it reaches, as it enters the tree: multiplied by `scale`, the loss scale. `alone`:
    each sample with its loss alone, which is another computation, and `why_not` of those for which that
    cannot be. `missing` are those that the dataset does not have, and `inputs` is the digest of the batch.

    With `keeps` also `tensors`: the `model`'s state, the `batch`, the `outputs` and the `gradients`.
    """

    lane: int
    keeps: bool = False

    def follow(self, replay: Replay, world: World) -> Any:
        replay.advance()
        found = self._run_lane(replay)
        return next(filter(None, world.all_gather_tree(found))) if world.world_size > 1 else found

    def _run_lane(self, replay: Replay) -> dict[str, Any] | None:
        """Run the lane; None on the processes that do not carry it. Collective."""
        run, pass_, step, lane = replay.engine.run, replay.engine.step.pass_, replay.num_taken, self.lane
        if run.reducer.forward_is_collective:
            raise ConfigError("under fsdp no lane runs alone. Leave distributed.reducer out.")
        runner, model = run.runner, run.reducer.model
        kept = StepBatches(iter(to_device(replay.batches, run.world.device)))
        pass_.begin(step)
        if lane not in (present := kept.turn.present):
            raise ConfigError(
                f"lane {lane} has no samples in step {step + 1}. Name one of {', '.join(map(str, present))}."
            )
        batch = next((batch for batch in kept if batch.turn.lane == lane), None)
        if batch is not None and not batch.has_samples:
            raise ConfigError(
                f"lane {lane} has no samples in step {step + 1}: all are missing. Name another."
            )
        tensors, inputs = dict[str, Any](), "" if batch is None else digest(batch.data)
        if batch is not None and self.keeps:
            tensors = {"model": copied(model.state_dict()), "batch": copied(batch.data)}
            with kept_buffers([model]):
                tensors["outputs"] = runner.lane(batch).forward(model, copied(batch.data))
        found: dict[str, Any] | None = None
        for turn, loss in _losses(replay, kept, lane):
            if turn.lane == lane and batch is not None:
                gradients = lane_gradients(model, *loss.root(turn, pass_.message.scale))
                found = {"samples": list(batch.indices), "loss": _mean(loss), "weight": loss.weight}
                found["missing"] = [batch.indices[place] for place in batch.missing]
        if found is None or batch is None:
            return None
        found |= {"scale": pass_.message.scale, "inputs": inputs, "digests": digests_of(gradients)}
        found["changed_sources"] = replay.changed_sources
        found["norms"] = {name: float(torch.linalg.vector_norm(one)) for name, one in gradients.items()}
        found["alone"], found["why_not"] = _samples_alone(run, batch)
        if self.keeps:
            found["tensors"] = map_leaves(torch.Tensor.detach, tensors) | {"gradients": gradients}
        return found


def lane_gradients(model: torch.nn.Module, root: Any, factor: Any) -> dict[str, torch.Tensor]:
    """Return what a backward adds to the gradient of each parameter that it reaches."""
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    made: Sequence[Any] = [None] * len(trained)
    if root is not None:
        made = torch.autograd.grad(root, [*trained.values()], factor, allow_unused=True)
    return {name: one for name, one in zip(trained, made, strict=True) if one is not None}


def _losses(replay: Replay, kept: StepBatches, lane: int) -> Iterator[tuple[LaneTurn, LaneLoss]]:
    """Yield the loss of a lane, if this process has it, and of others that it depends on. Collective."""
    step, runner, model = replay.engine.step, replay.engine.run.runner, replay.engine.reducer.model
    message, scale = step.pass_.message, step.pass_.message.loss_scale
    needs_unit = scale is not None and not scale.has_unit  # of the loss scale, which another lane gives
    if runner.loss_method == "loss" and not runner.has_several_losses and not needs_unit:
        for batch in kept.copies():
            if batch.turn.lane == lane:
                with kept_buffers([model]):
                    yield batch.turn, runner.lane(batch).run(model)
        return
    for in_round in step.pass_.rounds(step.losses.begin(iter(kept))):  # with all forwards, and their exchange
        lanes = step.pass_.start(in_round, step.losses.lane)
        losses = step.losses.of(lanes, step.pass_.reducer.run(lanes))
        for batch, returned in zip(in_round, losses, strict=True):
            loss = returned
            if not isinstance(loss, LaneLoss):
                loss = LaneLoss.of(returned, batch.num_samples, runner.what)
            message.add(batch, loss)
            yield batch.turn, loss


def _mean(loss: LaneLoss) -> float:
    return math.nan if loss.sum is None else loss.sum.item() / (loss.weight or 1.0)


def _samples_alone(run: Run, batch: LaneBatch) -> tuple[list[tuple[int, float]], str]:
    """Return samples of a lane with their loss alone, and why not of all: BatchNorm needs several."""
    runner, model, found, why = run.runner, run.reducer.model, list[tuple[int, float]](), ""
    for row in range(len(batch.indices)):
        try:
            for one in to_device(_sample(run, batch, row), run.world.device):
                with kept_buffers([model]):
                    found.append((one.indices[0], _mean(runner.lane(one).run(model))))
        except Exception as error:  # noqa: BLE001 - code of the user's, for a batch that it may not be made for
            why = text_of(error).partition("\n")[0]
    return found, why or ("" if found else "the samples of this stream are no rows of tensors")


def _sample(run: Run, batch: LaneBatch, row: int) -> Iterator[LaneBatch]:
    """Yield the batch of one sample: read again by its index; of a stream the row of its tensors."""
    reader, index, shape = run.loader.reader, batch.indices[row], (batch.num_samples,)
    if isinstance(reader, LaneReader):
        one = reader[batch.turn, (index,)]
        yield from [one] * one.has_samples
    elif all(tensor.shape[:1] == shape for tensor in tensors_in(batch.data)):
        data = map_leaves(itemgetter(slice(row, row + 1)), batch.data)
        yield replace(batch, indices=(index,), num_samples=1, data=data)
