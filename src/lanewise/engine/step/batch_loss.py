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

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, final

import torch
from torch import nn

from lanewise.data import LaneBatch
from lanewise.engine.step.batches import StepBatches
from lanewise.engine.step.gradient import LaneGradients
from lanewise.engine.step.lane import LaneLoss, LaneRunner, LaneShare, TaskLane, named_lane, to_device
from lanewise.engine.step.message import Term
from lanewise.engine.step.outputs import BatchOutputs, LaneOutputs, gather_outputs
from lanewise.errors import TaskError
from lanewise.lanes import LaneTurn, batch_loss_seed
from lanewise.nested import map_leaves, tensors_in
from lanewise.random_state import set_random_state
from lanewise.reduce import LaneWork
from lanewise.reduce.all_reduce import open_all_reduce
from lanewise.reduce.pending import new_tree_sum
from lanewise.reduce.reducer import trained_parameters


class WholeLoss(Protocol):
    """A loss of all samples of a step."""

    by_rows: bool
    """Whether it is computed for the samples of each lane in turn, against those of all lanes."""

    def lane(self, batch: LaneBatch) -> LaneWork:
        """Return a lane, whose forward is run."""
        ...

    def values(self, outputs: Any, data: Any) -> Any:
        """Return what the loss needs of a lane: tensors whose first dimension is its samples."""
        ...

    def compute(self, model: nn.Module, values: Any, rows: slice) -> object:
        """Return the loss, a mean over the samples or a `Loss`, of what the lanes returned.

        Args:
            model: the user's module.
            values: what `values` returned, of all lanes.
            rows: the samples whose loss it is: all of them, or where `by_rows` those of a lane.
        """
        ...


@final
class TaskLoss:
    """The `WholeLoss` of a task.

    Args:
        runner: of a task that has `batch_loss` or `row_loss`.
    """

    def __init__(self, runner: LaneRunner) -> None:
        self._runner = runner
        self.by_rows = runner.loss_method == "row_loss"

    def lane(self, batch: LaneBatch) -> TaskLane:
        """See `WholeLoss`."""
        return self._runner.lane(batch)

    def values(self, outputs: Any, data: Any) -> Any:
        """See `WholeLoss`."""
        return outputs, self._runner.task.batch_loss_inputs(data)

    def parts(self, outputs: BatchOutputs, lanes: range) -> list[tuple[int, slice]]:
        """Return what this process computes of a batch: lanes and the samples whose loss it is."""
        if outputs.values is None:
            return []
        if not self.by_rows:
            return [(min(outputs.rows), slice(0, outputs.num_samples))]
        return [(lane, rows) for lane, rows in outputs.rows.items() if lane in lanes]

    def compute(self, model: nn.Module, values: Any, rows: slice) -> object:
        """See `WholeLoss`."""
        outputs, inputs = values
        return self._runner.batch_loss(model, outputs, inputs, rows)


_NO_SHARE = LaneShare(None, Term(0.0, 0.0), is_sample_mean=False)
"""Of a lane without samples."""


@dataclass(slots=True)
class _OutputLane:
    """A lane whose outputs are wanted, and the module on which it ran; a `LaneWork`."""

    whole: WholeLoss
    batch: LaneBatch
    lane: LaneWork
    keeps_graph: bool
    model: nn.Module | None = None

    @property
    def turn(self) -> LaneTurn:
        """See `LaneWork`."""
        return self.lane.turn

    @property
    def data(self) -> Any:
        """See `LaneWork`."""
        return self.lane.data

    @property
    def has_samples(self) -> bool:
        """See `LaneWork`."""
        return self.lane.has_samples

    def forward(self, model: nn.Module, data: Any) -> Any:
        """See `LaneWork`."""
        self.model = model
        return self.lane.forward(model, data)

    def loss(self, outputs: Any, data: Any) -> Any:
        """Return what the lane gives to the loss."""
        with named_lane(self.batch):
            values = self.whole.values(outputs, data)
        return values if self.keeps_graph else map_leaves(_without_graph, values)


@dataclass(frozen=True)
class _Share:
    """What a lane's backward begins with."""

    gradients: Sequence[torch.Tensor]
    """Of each of the lane's outputs that has a graph."""
    of_parameters: Mapping[int, torch.Tensor]
    """Of parameters that the loss itself uses, by their number among the trained ones."""
    term: Term
    is_sample_mean: bool
    metrics: Mapping[str, Term]

    def seed(self, lane: _OutputLane, values: Any) -> LaneShare:
        """Return a scalar whose backward gives these gradients to the lane's outputs and parameters."""
        assert lane.model is not None
        outputs = [one for one in tensors_in(values) if one.requires_grad]
        parameters = trained_parameters(lane.model) if self.of_parameters else []
        tensors = [*outputs, *(parameters[number] for number in self.of_parameters)]
        gradients = [*self.gradients, *self.of_parameters.values()]
        gradients = [one.to(tensor.device) for one, tensor in zip(gradients, tensors, strict=True)]
        value: torch.Tensor = _Begin.apply(gradients, *tensors)  # type: ignore[no-untyped-call]
        return LaneShare(value, self.term, self.is_sample_mean, self.metrics)


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
class BatchGradients:
    """Runs the lanes of a step for a loss of all its samples. See the module.

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
        self._all_reduce = (
            open_all_reduce(self._world, self._placement, self._equality)
            if self._world.world_size > 1
            else None
        )

    def run(
        self,
        batches: Iterator[LaneBatch],
        loss: WholeLoss,
        what: str,
        is_logged: Callable[[int], bool] = lambda _: False,
    ) -> None:
        """Run the forwards, the loss and the backwards of a step; `LaneGradients.finish` completes it.

        Collective: every rank must call this, with the batches of its own lanes.

        Args:
            batches: consumed for one step, from where the reader left them.
            loss: of all samples of the step.
            what: the name of the loss in an error message.
            is_logged: see `LaneGradients.rounds`.
        """
        gradients, device = self._gradients, self._world.device
        kept = StepBatches(batches)
        turn = kept.first.turn
        twice = self._is_first_step or self._runs_twice(turn)
        before: dict[int, LaneOutputs] = {}
        shares: Mapping[int, _Share] = {}
        if twice:
            before = self._forward(kept, loss)
            with self._reducer.gathered(self._reducer.replicas[0]):
                shares = self._share_out(before, loss, turn, what)
        for in_round in gradients.rounds(to_device(kept, device), is_logged):
            lanes = [_OutputLane(loss, batch, loss.lane(batch), keeps_graph=True) for batch in in_round]
            values = self._reducer.losses(lanes)
            if self._is_first_step:
                self._compare(before, lanes, values)
            if not twice:
                with self._reducer.gathered(self._reducer.replicas[0]):
                    shares = self._share_out(_outputs_of(lanes, values), loss, turn, what)
            seeds = [
                shares[lane.turn.lane].seed(lane, of_lane) if lane.has_samples else _NO_SHARE
                for lane, of_lane in zip(lanes, values, strict=True)
            ]
            gradients.backward(seeds, what)
        self._is_first_step = False

    def close(self) -> None:
        """Stop the background work."""
        if self._all_reduce is not None:
            self._all_reduce.close()

    def _runs_twice(self, turn: LaneTurn) -> bool:
        """Whether graphs are dropped: some process would keep several. The same on every rank."""
        most = max(self._placement.counts(turn.num_present_lanes))
        return self._reducer.forward_is_collective or most > len(self._reducer.replicas)

    def _forward(self, kept: StepBatches, loss: WholeLoss) -> dict[int, LaneOutputs]:
        """Run each lane's forward, with gradients on, as the second one has them, and drop its graph."""
        outputs: dict[int, LaneOutputs] = {}
        for in_round in self._gradients.forward_rounds(to_device(kept.copies(), self._world.device)):
            lanes = [_OutputLane(loss, batch, loss.lane(batch), keeps_graph=False) for batch in in_round]
            outputs |= _outputs_of(lanes, self._reducer.forwards(lanes))
        return outputs

    def _compare(
        self, before: Mapping[int, LaneOutputs], lanes: Sequence[_OutputLane], values: Sequence[Any]
    ) -> None:
        """Raise TaskError if the second forward of a lane gave other outputs than the first."""
        tolerance = {"rtol": 0.0, "atol": 0.0} if self._equality == "exact" else {"rtol": 1e-2, "atol": 1e-4}
        for number, second in _outputs_of(lanes, values).items():
            pairs = zip(tensors_in(before[number].values), tensors_in(second.values), strict=True)
            if all(
                torch.allclose(one.detach(), two.to(one.device), **tolerance, equal_nan=True)
                for one, two in pairs
            ):
                continue
            raise TaskError(
                f"lane {number} of step {lanes[0].turn.step + 1} gave other outputs when its forward ran a "
                "second time, from equal weights, buffers and random state: what it uses changed in between. "
                "Keep nothing from one forward to the next. lanewise verify names what changed."
            )

    def _share_out(
        self, local: Mapping[int, LaneOutputs], loss: WholeLoss, turn: LaneTurn, what: str
    ) -> dict[int, _Share]:
        """Compute the loss, and return the share of each of this process's lanes. Collective."""
        of_lanes = [local[lane] for lane in sorted(local)]
        outputs = gather_outputs(of_lanes, turn.step, self._world, self._placement.most)
        self._gradients.losses.find_not_finite = lambda: [
            one.lane for one in of_lanes if not all(map(_is_finite, tensors_in(one.values)))
        ]
        compute = partial(self._compute, loss, outputs, what)
        if loss.by_rows:
            return self._share_rows(compute, outputs, turn)
        if outputs.values is None:
            self._gradients.losses.agree_on_unit(0.0)
            self._agree(None, what)
            return {}
        set_random_state(batch_loss_seed(self._seed, turn.step))
        computed = compute(slice(0, outputs.num_samples), turn)
        self._agree(computed.loss, what)
        first = min(outputs.rows)
        return {
            lane: _Share(
                [one[outputs.rows[lane]] for one in computed.of_outputs],
                computed.of_parameters if lane == first else {},
                computed.loss.term if lane == first else Term(0.0, 0.0),
                computed.loss.is_sample_mean,
                computed.loss.metrics if lane == first else {},
            )
            for lane in local
        }

    def _agree(self, loss: LaneLoss | None, what: str) -> None:
        """Raise TaskError if processes computed different losses. Collective, in the first step only."""
        if not self._is_first_step:
            return
        own = None if loss is None or loss.sum is None else loss.sum.item()
        told = [one for one in self._world.all_gather_tree(own) if one is not None]
        tolerance = 0.0 if self._equality == "exact" else 1e-3
        if told and not torch.allclose(*torch.tensor(told).aminmax(), tolerance, 0.0, equal_nan=True):
            raise TaskError(
                f"{what} differs between processes, which all get the samples of all lanes: {told}. It must "
                "depend on nothing else: not on the rank, nor on random numbers of a generator of its own."
            )

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
        checked = LaneLoss.of_samples(loss.compute(model, outputs.values, rows), rows.stop - rows.start, what)
        if self._world.num_collectives() != num_collectives:
            raise TaskError(
                f"{what} communicates with other processes. It is given the samples of all lanes: gather "
                "nothing in it."
            )
        for name, one in model.named_buffers():
            if name in buffers and not torch.equal(one, buffers[name]):
                raise TaskError(f"{what} changes the buffer {name}. Change buffers in the forward.")
        losses.agree_on_unit(checked.weight)
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
    ) -> dict[int, _Share]:
        """Compute the loss of each lane's samples against those of all lanes. Collective.

        The gradient of the outputs is added over the lanes, in the tree.
        """
        tree_sum = new_tree_sum(self._placement.num_lanes, turn.num_present_lanes)
        computed: dict[int, _Computed] = {}
        flat = torch.zeros(outputs.num_gradients, dtype=outputs.gradient_dtype, device=self._world.device)
        for lane in self._placement.own:
            if lane >= turn.num_present_lanes:
                continue
            flat = torch.zeros_like(flat)
            if lane in outputs.rows:
                set_random_state(batch_loss_seed(self._seed, turn.step, lane))
                computed[lane] = compute(outputs.rows[lane], turn)
                torch.cat([one.flatten().to(flat.dtype) for one in computed[lane].of_outputs], out=flat)
            tree_sum.push((lane, lane + 1), [flat])
        self._gradients.losses.agree_on_unit(0.0)
        sums = [one for _, (one,) in tree_sum.pending]
        if self._all_reduce is None:
            (flat,) = sums
        else:
            num_units = turn.num_present_lanes
            if self._equality == "close":
                sums, num_units = [sum(sums, torch.zeros_like(flat))], self._world.world_size
            flat = self._all_reduce.start(sums, num_units, sums[-1] if sums else flat).wait()
        of_outputs = list(outputs.split(flat))
        return {
            lane: _Share(
                [one[outputs.rows[lane]] for one in of_outputs],
                one_lane.of_parameters,
                one_lane.loss.term,
                one_lane.loss.is_sample_mean,
                one_lane.loss.metrics,
            )
            for lane, one_lane in computed.items()
        }


def _outputs_of(lanes: Sequence[_OutputLane], values: Sequence[Any]) -> dict[int, LaneOutputs]:
    """Return what the lanes of a round returned, without those that have no samples."""
    return {
        lane.turn.lane: LaneOutputs(lane.turn.lane, lane.batch.num_samples, of_lane)
        for lane, of_lane in zip(lanes, values, strict=True)
        if lane.has_samples
    }


def _without_graph(leaf: Any) -> Any:
    """Return a tensor without its graph, which still tells whether it had one."""
    return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf


def _is_finite(tensor: torch.Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())
