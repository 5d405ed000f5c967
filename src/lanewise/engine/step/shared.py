"""The gradient of a loss that compares all samples of a step, as contrastive losses do.

Each lane's forward runs twice (GradCache, Gao et al., 2021, arXiv 2101.06983). The first time its graph is
dropped at once; the outputs of all lanes travel to every process, which computes the loss and the gradient of
these outputs, all alike. The second time, under the same random numbers and from the same buffers, the lane's
backward begins with its share of that gradient:

    forward of each lane   outputs travel   loss and gradient   forward and backward of each lane
    (no graph is kept)                      of all outputs      (the last one overlaps the reduction)

So a process holds the activations of one lane, whatever the global batch, and every byte is the same on any
number of processes. Where no process has more than one lane, the graphs of the first forward are kept, and
there is no second one; but the first step has two, and compares them.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, final

import torch
from torch import nn

from lanewise.data import LaneBatch
from lanewise.engine.step.lanes import DerivedLane, LaneLosses, StepBatches
from lanewise.engine.step.outputs import BatchOutputs, LaneOutputs, as_real, gather_outputs, map_tensors
from lanewise.engine.step.step import Pass
from lanewise.engine.step.terms import LaneLoss, check_whole
from lanewise.engine.step.whole_loss import WholeLoss, without_graph
from lanewise.errors import TaskError
from lanewise.lanes import LaneTurn, backward_seed, batch_loss_seed
from lanewise.processes.device.nested import tensors_in
from lanewise.processes.device.random_state import set_random_state
from lanewise.processes.watch.heartbeat import COMMUNICATION, FORWARD
from lanewise.reduce import LaneWork
from lanewise.reduce.pending import new_tree_sum
from lanewise.reduce.reducer import trained_parameters


@dataclass(frozen=True)
class Share:
    """What a lane's backward begins with."""

    gradients: Sequence[torch.Tensor]
    """The gradient of each of the lane's outputs that has a graph."""
    of_parameters: Mapping[int, torch.Tensor]
    """The gradients of parameters that the loss itself uses, by their number among the trained ones."""
    reported: LaneLoss
    """The loss that this lane reports: one of all lanes is reported by the first."""

    def of_lane(self, model: nn.Module, values: Any) -> LaneLoss:
        """Return the loss, with a scalar whose backward gives these gradients to the outputs and parameters.

        Args:
            model: the module on which the lane ran.
            values: what the lane returned.
        """
        outputs = [tensor for tensor in tensors_in(values) if tensor.requires_grad]
        parameters = trained_parameters(model) if self.of_parameters else []
        tensors = [*outputs, *(parameters[number] for number in self.of_parameters)]
        gradients = [*self.gradients, *self.of_parameters.values()]
        gradients = [gradient.to(tensor.device) for gradient, tensor in zip(gradients, tensors, strict=True)]
        share: torch.Tensor = _Begin.apply(gradients, *tensors)  # type: ignore[no-untyped-call]
        return replace(self.reported, share=share)


@dataclass(frozen=True)
class _Computed:
    """A loss, and its gradients."""

    loss: LaneLoss
    of_outputs: list[torch.Tensor]
    of_parameters: dict[int, torch.Tensor]
    """The gradients of parameters, by the number of the parameter among the trained ones."""


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
@dataclass(eq=False)
class SharedLoss(LaneLosses):
    """Runs the lanes of a step for a loss of all its samples. See the module.

    It is computed alike on every process, or by rows each lane's where it is carried.
    """

    pass_: Pass
    """Hands out the lanes of the model, and tells the loss to the other processes."""
    seed: int
    """Seed of the run."""
    loss: WholeLoss
    """The loss of all samples of a step."""
    repeat: int = 0
    """How many passes the step had before this one; for random numbers."""
    compares: bool = True
    """Whether two forwards of each lane are compared, as in the first step."""
    _before: Sequence[LaneOutputs] = field(default=(), init=False)
    """What the lanes returned in the first pass over a step; empty where there is one pass only."""
    _shares: Mapping[int, Share] | None = field(default=None, init=False)
    """Of this process's lanes in a step; None before the loss is computed."""

    def __post_init__(self) -> None:
        self._reducer, self._phases, self._message = self.pass_.reducer, self.pass_.phases, self.pass_.message
        self._world, self._placement = self.pass_.spread.world, self.pass_.spread.placement
        is_exact = self.pass_.spread.equality == "exact"
        self.lane = self.loss.lane
        self._tolerance = {"rtol": 0.0, "atol": 0.0} if is_exact else {"rtol": 1e-2, "atol": 1e-4}

    def begin(self, batches: Iterator[LaneBatch]) -> StepBatches:
        kept = StepBatches(batches)
        if self.compares or self._runs_twice(kept.turn):
            # With gradients on, as the second forward has them; each graph is dropped at once.
            self._before = _outputs_of(self.pass_.forwards(kept, partial(self.lane, keeps_graph=False)))
            self._shares = self._share_out(self._before, kept.turn)
        return kept

    def of(self, lanes: Sequence[DerivedLane], returned: Sequence[Any]) -> Iterator[LaneLoss]:
        turn = lanes[-1].batch.turn
        if self._shares is None:  # there was no first pass, and there is no other round
            self._shares = self._share_out(_outputs_of(zip(lanes, returned, strict=True)), turn)
        for lane, values in zip(lanes, returned, strict=True):
            if self.compares:
                self._require_equal(self._before, _outputs_of([(lane, values)]), turn)
            loss = LaneLoss()
            if lane.batch.has_samples:
                assert lane.model is not None
                loss = self._shares[lane.batch.turn.lane].of_lane(lane.model, values)
            # The loss drew since the forward, or on several lanes another forward did.
            set_random_state(backward_seed(self.seed, turn.step, lane.batch.turn.lane, self.repeat))
            yield loss
        if turn.is_last:
            self._before, self._shares, self.compares = (), None, False

    def _runs_twice(self, turn: LaneTurn) -> bool:
        """Whether graphs are dropped: some process would keep several. The same on every rank."""
        most = max(self._placement.counts(turn.present))
        return self._reducer.forward_is_collective or most > len(self._reducer.replicas)

    def _require_equal(
        self, before: Sequence[LaneOutputs], again: Sequence[LaneOutputs], turn: LaneTurn
    ) -> None:
        """Raise TaskError if the second forward of a lane gave other outputs than the first."""
        first = {outputs.lane: outputs.values for outputs in before if outputs.num_samples}
        for second in (outputs for outputs in again if outputs.num_samples):
            both = zip(tensors_in(first[second.lane]), tensors_in(second.values), strict=True)
            if not all(
                torch.allclose(tensor, tensor_again.detach(), **self._tolerance, equal_nan=True)
                for tensor, tensor_again in both
            ):
                raise TaskError(
                    f"lane {second.lane} of step {turn.step + 1} gave other outputs when its forward ran a "
                    "second time, from equal weights, buffers and random state: what it uses changed in "
                    "between. Keep nothing from one forward to the next. lanewise verify names what changed."
                )

    def _share_out(self, local: Sequence[LaneOutputs], turn: LaneTurn) -> dict[int, Share]:
        """Compute the loss of a step, and return the share of each of this process's lanes.

        Collective: every rank must call this.

        Args:
            local: what this process's lanes returned; see `gather_outputs`.
            turn: one of this process in the step.
        """
        self._phases.begin(COMMUNICATION, turn.step)
        outputs = gather_outputs(local, turn.step, self._world, self._placement.most)
        self.pass_.judgement.describe_common(
            self.loss.what,
            lambda: [one.lane for one in local if not all(map(_is_finite, tensors_in(one.values)))],
        )
        self._phases.begin(FORWARD, turn.step)
        with self._reducer.gathered(self._reducer.model):
            return self._share_rows(outputs, turn) if self.loss.by_rows else self._share_whole(outputs, turn)

    def _share_whole(self, outputs: BatchOutputs, turn: LaneTurn) -> dict[int, Share]:
        """Compute the loss on every process; the first lane tells it, and has the gradient of parameters."""
        self._message.fields["common_loss"] = [math.nan]
        if not outputs.rows:
            self._message.agree_on_unit(0.0, is_of_all=True)
            return {}
        set_random_state(batch_loss_seed(self.seed, turn.step, repeat=self.repeat))
        computed = self._compute(outputs, slice(0, outputs.num_samples), turn)
        if computed.loss.sum is not None:
            self._message.fields["common_loss"] = computed.loss.sum.detach().reshape(1)
        first = min(outputs.rows)
        return {
            lane: Share(
                [gradient[rows] for gradient in computed.of_outputs],
                computed.of_parameters if lane == first else {},
                computed.loss if lane == first else LaneLoss(),
            )
            for lane, rows in outputs.rows.items()
            if lane in self._placement.own
        }

    def _compute(self, outputs: BatchOutputs, rows: slice, turn: LaneTurn) -> _Computed:
        """Compute the loss of some samples, and its gradients times the loss scale."""
        model, loss, what = self._reducer.model, self.loss, self.loss.what
        tensors, trained = outputs.with_gradients(), trained_parameters(model)
        if not tensors:
            raise TaskError(
                f"{what}: the outputs of the lanes have no gradient, so nothing would be trained. Return "
                "them from the forward without detach(), item() or torch.no_grad()."
            )
        num_collectives = self._world.num_collectives()
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()} if self.compares else {}
        compute, num_samples = partial(loss.compute, model, outputs.values, rows), rows.stop - rows.start
        for look in self.pass_.looks if loss.by_rows else ():
            look.before_rows(turn, compute, what)
        returned = compute()
        checked = (LaneLoss.of if loss.by_rows else check_whole)(returned, num_samples, what)
        if self._world.num_collectives() != num_collectives:
            raise TaskError(
                f"{what} communicates with other processes. It is given the samples of all lanes: gather "
                "nothing in it."
            )
        for name, buffer in model.named_buffers():
            if name in buffers and not torch.equal(buffer, buffers[name]):
                raise TaskError(f"{what} changes the buffer {name}. Change buffers in the forward.")
        self._message.agree_on_unit(checked.weight or num_samples, is_of_all=not loss.by_rows)
        if checked.value is None:
            return _Computed(checked, [torch.zeros_like(tensor) for tensor in tensors], {})
        for look in self.pass_.looks:
            look.after_common(checked.value, what, tensors)
        root, factor = checked.root(turn, self._message.scale)
        assert root is not None
        made: Sequence[torch.Tensor | None] = torch.autograd.grad(
            root, [*tensors, *trained], factor, allow_unused=True
        )
        of_outputs = [
            torch.zeros_like(tensor) if gradient is None else gradient
            for tensor, gradient in zip(tensors, made[: len(tensors)], strict=True)
        ]
        used = {
            number: gradient for number, gradient in enumerate(made[len(tensors) :]) if gradient is not None
        }
        return _Computed(checked, of_outputs, used)

    def _share_rows(self, outputs: BatchOutputs, turn: LaneTurn) -> dict[int, Share]:
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
                set_random_state(batch_loss_seed(self.seed, turn.step, lane, repeat=self.repeat))
                made = self._compute(outputs, outputs.rows[lane], turn)
                computed[lane] = made.loss, made.of_parameters
                torch.cat(
                    [as_real(gradient).flatten().to(flat.dtype) for gradient in made.of_outputs], out=flat
                )
            else:
                self._message.agree_on_unit(0.0)  # as a process that has no other lane does
            tree_sum.push((lane, lane + 1), [flat])
        sums = [flat_sum for _, (flat_sum,) in tree_sum.pending]
        if self._world.world_size > 1:
            self._phases.begin(COMMUNICATION, turn.step)
        flat = self._reducer.sum_subtrees(sums, turn.present, flat)
        self._phases.begin(FORWARD, turn.step)
        of_outputs = outputs.split(flat) if computed else []
        return {
            lane: Share([gradient[outputs.rows[lane]] for gradient in of_outputs], of_parameters, checked)
            for lane, (checked, of_parameters) in computed.items()
        }


def _outputs_of(returned: Iterable[tuple[LaneWork, Any]]) -> list[LaneOutputs]:
    """Return what lanes returned; of one without samples what tells its form, if anything."""
    return [
        LaneOutputs(lane.batch.turn.lane, lane.batch.num_samples, of_lane)
        if lane.batch.has_samples
        else LaneOutputs(lane.batch.turn.lane, 0, map_tensors(_without_samples, of_lane))
        for lane, of_lane in returned
        if of_lane is not None
    ]


def _is_finite(tensor: torch.Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())


def _without_samples(tensor: torch.Tensor) -> torch.Tensor:
    return without_graph(tensor)[:0] if tensor.dim() else tensor
