"""The optimizer steps of the user's own loop, and the micro-batches in each."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from lanewise.data import LaneBatch, LaneSource
from lanewise.engine.buffers.pack import BufferPlace
from lanewise.engine.own_loop.replay import replayed
from lanewise.engine.step.lanes import StepBatches
from lanewise.engine.step.metrics import Gradient
from lanewise.engine.step.phases import Phases
from lanewise.engine.step.shared import SharedLoss
from lanewise.engine.step.step import Pass
from lanewise.engine.step.totals import means
from lanewise.engine.step.whole_loss import WholeLoss
from lanewise.engine.step.wire import Spread
from lanewise.errors import TaskError
from lanewise.lanes import LaneTurn, lane_seed, update_seed
from lanewise.processes.device.random_state import set_random_state
from lanewise.processes.watch.heartbeat import OWN_CODE, heartbeat


@dataclass(frozen=True)
class Prepared:
    """The prepared models of a loop; models may be added until the first step."""

    seed: int
    """Seed of the run."""
    spread: Spread
    phases: Phases
    """Measures the phases of all `passes`."""
    passes: dict[nn.Module, Pass] = field(default_factory=dict)
    """What computes the gradients of each model."""
    trained: dict[nn.Module, set[int]] = field(default_factory=dict)
    """The ids of the parameters of each model that are trained."""
    left: dict[nn.Module, tuple[int, list[int]]] = field(default_factory=dict)
    """Of each model that an optimizer updates: the step of the gradient that its last pass left, and the
    versions of its parameters then; none once the gradient was used."""
    compared: set[nn.Module] = field(default_factory=set)
    """The models with which `Step.batch_loss` compared two forwards of each lane."""
    step_state: list[list[BufferPlace]] = field(default_factory=lambda: [[]])
    """The buffers of all models that no lane writes; see `LaneBuffers`."""
    digests: dict[nn.Module, Mapping[str, str]] = field(default_factory=dict)
    """What `digests_left_out` returned of each model when it was prepared."""
    finish_saves: list[Callable[[], None]] = field(default_factory=list)
    """Each waits for the last save of some checkpoints; or what else is to be done at the end."""

    def __post_init__(self) -> None:
        self.finish_saves.append(register_optimizer_step_post_hook(self._note_update).remove)

    def close(self) -> None:
        """Wait for the last saves, and stop the background work."""
        with ExitStack() as stack:  # each is waited for, also if another failed
            while self.finish_saves:
                stack.callback(self.finish_saves.pop())
        for pass_ in self.passes.values():
            pass_.reducer.close()

    def require_used(self, model: nn.Module) -> None:
        """Raise TaskError if a gradient of the model is there that nothing used, and a pass would forget."""
        for other, (step, versions) in self.left.items():
            trained = self.passes[other].reducer.parameters
            if not (versions and versions == _versions(trained) and any(map(_has_gradient, trained))):
                self.left[other] = 0, []  # the loop has used it by itself, or dropped it
            elif other is model:
                raise TaskError(
                    f"no optimizer used the gradient of step {step + 1}, which is gone in the next pass: "
                    "gradients do not add up over passes. Train on two datasets by one dataset of pairs, on "
                    "several losses by their sum in one backward, and accumulate by a larger "
                    "global_batch_size. Call optimizer.zero_grad() to drop a gradient on purpose."
                )

    def _note_update(self, optimizer: Optimizer, *_: object) -> None:
        """Note that an optimizer used the gradients of its parameters."""
        for model, trained in self.trained.items():
            if any(not trained.isdisjoint(map(id, group["params"])) for group in optimizer.param_groups):
                self.left[model] = 0, []


@final
@dataclass(eq=False, repr=False)
class Steps:
    """The optimizer steps of a run. Each iteration yields the steps of one epoch, or the rest of an epoch."""

    _loader: LaneSource
    _prepared: Prepared
    _next: int
    _batches: Iterator[LaneBatch]
    """One iterator for the whole run, so that reading ahead continues from one epoch to the next."""
    _last: "Step | None" = None

    @property
    def epoch(self) -> int:
        """The epoch of the next step."""
        last = self._loader.end_of(self._next - 1)
        return last.epoch + last.ends_epoch

    def __len__(self) -> int:
        """Count the steps of an epoch; raise TypeError for a stream, where nobody knows."""
        if self._loader.schedule is None:
            raise TypeError("a stream does not tell how many steps an epoch has")
        return self._loader.schedule.steps_per_epoch

    def __iter__(self) -> "Iterator[Step]":
        epoch = self.epoch
        while self.epoch == epoch:
            if self._last is not None:
                _require_end(self._last, has_ended=self._last.is_done)
            step = self._last = Step(self._next, epoch, StepBatches(self._batches), self._prepared)
            self._next += 1
            yield step


@final
@dataclass(eq=False, repr=False)
class Step:
    """One optimizer step: an iterator over the micro-batches of the lanes that this process carries."""

    number: int
    """Index of the step over the whole run, from 0 as in Python; messages and files count from 1."""
    epoch: int
    _batches: StepBatches
    _prepared: Prepared
    _running: Pass | None = None
    _open: LaneBatch | None = None
    """The micro-batch that needs a `backward`."""
    _gradient: Gradient | None = None
    _num_passes: int = 0

    @property
    def is_done(self) -> bool:
        """Whether a loop over the micro-batches has reached its end, where the gradients are completed."""
        return self._num_passes > 0 and self._running is None

    def __iter__(self) -> Iterator[Any]:
        return self.batches(self._only_model("Iterate over step.batches(model)."))

    def _only_model(self, remedy: str) -> nn.Module:
        models = list(self._prepared.passes)
        if not models:
            raise TaskError("no model was prepared. Call lanes.prepare(model) before the first step.")
        if len(models) > 1:
            raise TaskError(
                f"{len(models)} models were prepared, so a step must know whose gradients to compute. "
                f"{remedy}"
            )
        return models[0]

    def batches(self, model: nn.Module) -> Iterator[Any]:
        """Yield the micro-batches; each needs one `backward`.

        After the last one, every parameter's `grad` is the weighted mean over the global batch; or it is None
        if there must be no update, because the global weight is 0 or an fp16 gradient overflowed.

        Collective: every rank must iterate to the end. Every call yields the same micro-batches, under other
        random numbers.

        Args:
            model: a prepared model. The gradients of other models stay as they are on this process.

        Raises:
            TaskError: if the model was not prepared, or a micro-batch had no `backward`.
            NonFiniteLossError: if the loss of some lane is NaN or infinite.
        """
        pass_, seed = self._begin(model), self._prepared.seed
        for in_round in pass_.rounds(self._batches):
            (batch,) = pass_.start(in_round, lambda batch: batch)
            turn, self._open = batch.turn, batch
            if batch.has_samples:
                set_random_state(lane_seed(seed, turn.step, turn.lane, self._num_passes))
                yield batch.data
            else:
                self.backward(None)
            if self._open is not None:
                raise TaskError(
                    f"a lane of step {turn.step + 1} had no backward. Call step.backward(loss), which is not "
                    "loss.backward(), once for each micro-batch; give lanewise.Loss(torch.zeros(()), 0) if "
                    "there is nothing to learn from it."
                )
        self._end(model, pass_, turn)

    def batch_loss(
        self, forward: Callable[[Any], Any], loss: Callable[[Any], object], model: nn.Module | None = None
    ) -> None:
        """Compute the gradients of a loss of all samples of the step, in place of a loop over micro-batches.

            step.batch_loss(lambda batch: model(batch[0]), contrastive_loss)
            optimizer.step()

        The forward of each micro-batch runs twice, under equal random state; see docs/losses.md.

        Collective: every rank must call this.

        Args:
            forward: returns the outputs of a micro-batch, and whatever else the loss needs: tensors whose
                first dimension is the samples, in any nested containers.
            loss: gets the same containers with the tensors of the global batch, in lane order, and returns
                the loss: a mean over the samples, or a `Loss`. Every process must return the same.
            model: a prepared model; needed if there are several.

        Raises:
            TaskError: if the outputs do not fit together, or the loss cannot be trained on.
            NonFiniteLossError: if the loss is NaN or infinite.
        """
        model = model or self._only_model("Give the model to step.batch_loss.")
        pass_, prepared = self._begin(model), self._prepared
        seed, num_passes = prepared.seed, self._num_passes

        def forward_of(batch: LaneBatch) -> Callable[[nn.Module, Any], Any]:
            def run(_model: nn.Module, data: Any) -> Any:
                set_random_state(lane_seed(seed, batch.turn.step, batch.turn.lane, num_passes))
                return forward(data)

            return run

        what = "the loss given to batch_loss"
        own = WholeLoss(what, forward_of, lambda outputs, _: outputs, lambda _, values, _rows: loss(values))
        shared = SharedLoss(pass_, seed, own, num_passes, compares=model not in prepared.compared)
        prepared.compared.add(model)
        turn = pass_.run(shared, iter(self._batches), what)
        self._end(model, pass_, turn)

    def replay(self, lane: int) -> AbstractContextManager[Any]:
        """Give the micro-batch of one lane, which runs alone as in a first pass; see `replayed`."""
        own = self._prepared
        return replayed(self._batches.copies(), lane, own.passes, own.seed, own.spread.world)

    def _begin(self, model: nn.Module) -> Pass:
        """Begin a pass over the micro-batches."""
        pass_ = self._prepared.passes.get(model)
        if pass_ is None:
            raise TaskError("this model was not prepared. Call lanes.prepare(model) before the first step.")
        _require_end(self, has_ended=self._running is None)
        self._prepared.require_used(model)
        self._running, self._gradient = pass_, None
        pass_.phases.forget()
        pass_.begin(self.number)
        return pass_

    def _end(self, model: nn.Module, pass_: Pass, turn: LaneTurn) -> None:
        """End a pass over the micro-batches, by this process's last turn. Collective."""
        self._gradient = pass_.finish(turn)
        if model in self._prepared.left:
            self._prepared.left[model] = self.number, _versions(pass_.reducer.parameters)
        pass_.phases.begin(OWN_CODE, self.number)
        heartbeat.has_trained = True
        set_random_state(update_seed(self._prepared.seed, self.number, self._num_passes))
        self._num_passes += 1
        self._running = None

    def backward(self, loss: object) -> None:
        """Compute the gradients of a micro-batch, in place of `loss.backward()`.

        The gradients of the step are complete when the loop over its micro-batches has ended.

        Args:
            loss: a mean over the micro-batch's samples, or a `Loss`.

        Raises:
            TaskError: if the loss cannot be trained on, or the call is outside of a loop over micro-batches.
        """
        if self._running is None:
            raise TaskError("backward was called outside of the loop over a step's micro-batches.")
        batch, self._open = self._open, None
        if batch is None:
            raise TaskError(
                "backward was called twice for one micro-batch, or outside of the loop over them. "
                "Add the losses of a micro-batch up and call it once; their graphs are in memory until then. "
                "If that is too much, as for long sequences, give each step a chunk of them and carry the "
                "hidden state (docs/own_loop.md), or use torch.utils.checkpoint or smaller micro-batches."
            )
        self._running.backward(batch, loss, "the loss given to backward")

    @property
    def loss(self) -> float:
        """Weighted mean of the loss over the global batch, in the last pass."""
        return self._done().totals.loss

    @property
    def weight(self) -> float:
        """Weight of the global batch, in the last pass."""
        return self._done().totals.weight

    @property
    def metrics(self) -> Mapping[str, float]:
        """Weighted mean over the global batch of each metric that a `Loss` reports, in the last pass.

        NaN where the weight is 0.
        """
        return means(self._done().totals.metrics)

    @property
    def gathered(self) -> Mapping[str, Any]:
        """The rows of all lanes in lane order, by the names of `Loss.gather`, in the last pass."""
        joined = self._done().totals.joined
        return {} if joined is None else joined.gathered

    @property
    def totals(self) -> Mapping[str, Any]:
        """The sums over all lanes, by the names of `Loss.total`, in the last pass."""
        joined = self._done().totals.joined
        return {} if joined is None else joined.totals

    @property
    def allows_update(self) -> bool:
        """Whether the step may update: its weight is not 0, and no fp16 gradient overflowed."""
        return self._done().allows_update

    @property
    def grad_norm(self) -> torch.Tensor:
        """L2 norm of the gradient before any clipping, a scalar on the device."""
        norm = self._done().norm
        assert norm is not None
        return norm

    def _done(self) -> Gradient:
        if self._gradient is None:
            raise TaskError(
                "loss, weight, metrics, gathered, totals and grad_norm are known when the loop over the "
                "step's micro-batches has ended, not before."
            )
        return self._gradient


def _require_end(step: Step, *, has_ended: bool) -> None:
    """Raise TaskError where a loop over the micro-batches of a step was left early."""
    if not has_ended:
        raise TaskError(
            f"step {step.number + 1} was left before its micro-batches were done. "
            "Iterate over each step to its end."
        )


def _versions(parameters: Sequence[nn.Parameter]) -> list[int]:
    return [parameter._version for parameter in parameters]


def _has_gradient(parameter: nn.Parameter) -> bool:
    return parameter.grad is not None and bool(parameter.grad.any())
