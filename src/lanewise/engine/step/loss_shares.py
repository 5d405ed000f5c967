"""Computes a loss of all samples of a step, and shares the gradient of the outputs out among the lanes."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import nn

from lanewise.engine.step.gradient import LaneGradients
from lanewise.engine.step.lane_loss import LaneLoss, LaneShare, add_own_terms, terms_of
from lanewise.engine.step.outputs import BatchOutputs, LaneOutputs, as_real, gather_outputs
from lanewise.engine.step.whole_loss import WholeLoss
from lanewise.errors import TaskError
from lanewise.lanes import LaneTurn, batch_loss_seed
from lanewise.nested import tensors_in
from lanewise.random_state import set_random_state
from lanewise.reduce.all_reduce import open_all_reduce
from lanewise.reduce.pending import new_tree_sum
from lanewise.reduce.reducer import trained_parameters
from lanewise.watch.heartbeat import COMMUNICATION, FORWARD, heartbeat


@dataclass(frozen=True)
class Share:
    """What a lane's backward begins with."""

    gradients: Sequence[torch.Tensor]
    """Of each of the lane's outputs that has a graph."""
    of_parameters: Mapping[int, torch.Tensor]
    """Of parameters that the loss itself uses, by their number among the trained ones."""
    told: LaneLoss | None
    """See `LaneShare`."""

    def seed(self, model: nn.Module, values: Any) -> LaneShare:
        """Return a scalar whose backward gives these gradients to the lane's outputs and parameters.

        Args:
            model: the module on which the lane ran.
            values: what the lane returned.
        """
        outputs = [one for one in tensors_in(values) if one.requires_grad]
        parameters = trained_parameters(model) if self.of_parameters else []
        tensors = [*outputs, *(parameters[number] for number in self.of_parameters)]
        gradients = [*self.gradients, *self.of_parameters.values()]
        gradients = [one.to(tensor.device) for one, tensor in zip(gradients, tensors, strict=True)]
        value: torch.Tensor = _Begin.apply(gradients, *tensors)  # type: ignore[no-untyped-call]
        return LaneShare(value, self.told)


@dataclass(frozen=True)
class _Computed:
    """A loss, and its gradients."""

    loss: LaneLoss
    of_outputs: list[torch.Tensor]
    of_parameters: dict[int, torch.Tensor]
    """By the number of the parameter among the trained ones."""


@final
class _Begin(torch.autograd.Function):
    """A scalar whose backward gives its inputs the gradients that it was made with."""

    @staticmethod
    def forward(ctx: Any, gradients: Sequence[torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
        ctx.gradients = gradients
        return torch.zeros((), device=tensors[0].device)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (None, *ctx.gradients)


@final
class LossShares:
    """Computes the loss of a step: alike on every process, or by rows each lane's where it is carried.

    Collective: every rank must construct it.

    Args:
        gradients: of the model.
        seed: of the run.
    """

    def __init__(self, gradients: LaneGradients, seed: int) -> None:
        self._gradients = gradients
        self._reducer = gradients.reducer
        self._world, self._placement = gradients.world, gradients.placement
        self._equality = gradients.equality
        self._seed = seed
        self._is_first_step = True
        self._all_reduce = None
        if self._world.world_size > 1:
            self._all_reduce = open_all_reduce(self._world, self._placement, self._equality)

    def run(
        self, local: Sequence[LaneOutputs], loss: WholeLoss, turn: LaneTurn, what: str
    ) -> dict[int, Share]:
        """Compute the loss of a step, and return the share of each of this process's lanes.

        Collective: every rank must call this.

        Args:
            local: what this process's lanes returned; see `gather_outputs`.
            loss: of all samples of the step.
            turn: one of this process in the step.
            what: the name of the loss in an error message.
        """
        clock = self._gradients.clock
        clock.lap(FORWARD, begins=COMMUNICATION)
        heartbeat.note = (COMMUNICATION, turn.step, None)
        outputs = gather_outputs(local, turn.step, self._world, self._placement.most)
        self._gradients.losses.find_not_finite = lambda: [
            one.lane for one in local if not all(map(_is_finite, tensors_in(one.values)))
        ]
        clock.lap(COMMUNICATION, begins=FORWARD)
        heartbeat.note = (FORWARD, turn.step, None)
        with self._reducer.gathered(self._reducer.replicas[0]):
            shares = self._share_out(outputs, loss, turn, what)
        clock.lap(FORWARD, begins=FORWARD)
        self._is_first_step = False
        return shares

    def close(self) -> None:
        """Stop the background work."""
        if self._all_reduce is not None:
            self._all_reduce.close()

    def _share_out(
        self, outputs: BatchOutputs, loss: WholeLoss, turn: LaneTurn, what: str
    ) -> dict[int, Share]:
        compute = partial(self._compute, loss, outputs, what)
        if loss.by_rows:
            return self._share_rows(compute, outputs, turn)
        self._gradients.losses.common_loss, self._gradients.losses.common_name = math.nan, what
        if outputs.values is None:
            self._gradients.losses.agree_on_unit(0.0, is_of_all=True)
            return {}
        set_random_state(batch_loss_seed(self._seed, turn.step))
        computed = compute(slice(0, outputs.num_samples), turn)
        if computed.loss.sum is not None:
            self._gradients.losses.common_loss = computed.loss.sum.detach()
        first = min(outputs.rows)
        return {
            lane: Share(
                [one[rows] for one in computed.of_outputs],
                computed.of_parameters if lane == first else {},
                computed.loss if lane == first else None,
            )
            for lane, rows in outputs.rows.items()
            if lane in self._placement.own
        }

    def _compute(
        self, loss: WholeLoss, outputs: BatchOutputs, what: str, rows: slice, turn: LaneTurn
    ) -> _Computed:
        """Compute the loss of some samples, and its gradients times the loss scale."""
        model, losses = self._reducer.replicas[0], self._gradients.losses
        tensors, trained = outputs.with_gradients(), trained_parameters(model)
        if not tensors:
            raise TaskError(
                f"{what}: the outputs of the lanes have no gradient, so nothing would be trained. Return "
                "them from the forward without detach(), item() or torch.no_grad()."
            )
        num_collectives = self._world.num_collectives()
        buffers = {name: one.clone() for name, one in model.named_buffers()} if self._is_first_step else {}
        returned, num_samples = loss.compute(model, outputs.values, rows), rows.stop - rows.start
        if (terms := terms_of(returned)) and not loss.by_rows:
            checked = add_own_terms(terms, num_samples, what)
        else:
            checked = LaneLoss.of_samples(returned, num_samples, what)
        if self._world.num_collectives() != num_collectives:
            raise TaskError(
                f"{what} communicates with other processes. It is given the samples of all lanes: gather "
                "nothing in it."
            )
        for name, one in model.named_buffers():
            if name in buffers and not torch.equal(one, buffers[name]):
                raise TaskError(f"{what} changes the buffer {name}. Change buffers in the forward.")
        if checked.value is not None and self._gradients.looks_at_leaves:
            self._gradients.foreign_leaves.require_own(checked.value, what, tensors)
        losses.agree_on_unit(checked.weight, is_of_all=not loss.by_rows)
        if checked.value is None:
            return _Computed(checked, [torch.zeros_like(one) for one in tensors], {})
        factor = checked.backward_factor(turn, losses.factor)
        made: Sequence[torch.Tensor | None] = torch.autograd.grad(
            checked.value, [*tensors, *trained], factor, allow_unused=True
        )
        of_outputs = [
            torch.zeros_like(one) if gradient is None else gradient
            for one, gradient in zip(tensors, made[: len(tensors)], strict=True)
        ]
        used = {number: one for number, one in enumerate(made[len(tensors) :]) if one is not None}
        return _Computed(checked, of_outputs, used)

    def _share_rows(
        self, compute: Callable[[slice, LaneTurn], _Computed], outputs: BatchOutputs, turn: LaneTurn
    ) -> dict[int, Share]:
        """Compute the loss of each lane's samples against those of all lanes. Collective.

        The gradient of the outputs is added over the lanes, in the tree.
        """
        tree_sum = new_tree_sum(self._placement.num_lanes, turn.present)
        computed: dict[int, tuple[LaneLoss, dict[int, torch.Tensor]]] = {}
        flat = torch.zeros(outputs.num_gradients, dtype=outputs.gradient_dtype, device=self._world.device)
        for lane in self._placement.own:
            if lane not in turn.present:
                continue
            flat = torch.zeros_like(flat)
            if lane in outputs.rows:
                set_random_state(batch_loss_seed(self._seed, turn.step, lane))
                made = compute(outputs.rows[lane], turn)
                computed[lane] = made.loss, made.of_parameters
                torch.cat([as_real(one).flatten().to(flat.dtype) for one in made.of_outputs], out=flat)
            else:
                self._gradients.losses.agree_on_unit(0.0)  # as a process that has no other lane does
            tree_sum.push((lane, lane + 1), [flat])
        sums = [one for _, (one,) in tree_sum.pending]
        if self._all_reduce is None:
            (flat,) = sums
        else:
            units = turn.present
            if self._equality == "close":
                sums, units = [sum(sums, torch.zeros_like(flat))], range(self._world.world_size)
            clock = self._gradients.clock
            clock.lap(FORWARD, begins=COMMUNICATION)
            flat = self._all_reduce.start(sums, units, sums[-1] if sums else flat).wait()
            clock.lap(COMMUNICATION, begins=FORWARD)
        of_outputs = outputs.split(flat) if computed else []
        return {
            lane: Share([one[outputs.rows[lane]] for one in of_outputs], of_parameters, checked)
            for lane, (checked, of_parameters) in computed.items()
        }


def _is_finite(tensor: torch.Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())
