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

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import nn

from lanewise.data import LaneBatch
from lanewise.engine.step.batches import StepBatches
from lanewise.engine.step.gradient import IsLogged, LaneGradients
from lanewise.engine.step.lane import LaneOfBatch, to_device
from lanewise.engine.step.lane_error import named_lane
from lanewise.engine.step.lane_loss import LaneShare
from lanewise.engine.step.loss_shares import LossShares, Share
from lanewise.engine.step.outputs import LaneOutputs, map_tensors
from lanewise.engine.step.whole_loss import WholeLoss
from lanewise.errors import TaskError
from lanewise.lanes import LaneTurn, backward_seed
from lanewise.nested import tensors_in
from lanewise.random_state import set_random_state
from lanewise.reduce import LaneWork

_NO_SHARE = LaneShare(None, None)
"""Of a lane without samples."""


@dataclass(slots=True)
class _OutputLane(LaneOfBatch):
    """A lane whose outputs are wanted, and the module on which it ran; a `LaneWork`."""

    whole: WholeLoss
    batch: LaneBatch
    lane: LaneWork
    keeps_graph: bool
    ran_on: nn.Module = field(init=False)

    def forward(self, model: nn.Module, data: Any) -> Any:
        """See `LaneWork`."""
        self.ran_on = model
        return self.lane.forward(model, data)

    def loss(self, outputs: Any, data: Any) -> Any:
        """Return what the lane gives to the loss."""
        with named_lane(self.batch):
            values = self.whole.values(outputs, data)
        return values if self.keeps_graph else map_tensors(_without_graph, values)


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
        self._seed = seed
        self._shares = LossShares(gradients, seed)
        self._is_first_step = True

    def run(
        self,
        loss: WholeLoss,
        what: str,
        batches: Iterator[LaneBatch],
        is_logged: IsLogged = lambda *_: False,
    ) -> None:
        """Run the forwards, the loss and the backwards of a step; `LaneGradients.finish` completes it.

        Collective: every rank must call this, with the batches of its own lanes.

        Args:
            loss: of all samples of the step.
            what: the name of the loss in an error message.
            batches: consumed for one step, from where the reader left them.
            is_logged: see `LaneGradients.rounds`.
        """
        gradients, device = self._gradients, self._gradients.world.device
        kept = StepBatches(batches)
        turn = kept.first.turn
        twice = self._is_first_step or self._runs_twice(turn)
        before: list[LaneOutputs] = []
        shares: Mapping[int, Share] = {}
        if twice:
            before = self._forward(kept, loss)
            shares = self._shares.run(before, loss, turn, what)
        for in_round in gradients.rounds(to_device(kept, device), is_logged):
            lanes = [_OutputLane(loss, batch, loss.lane(batch), keeps_graph=True) for batch in in_round]
            values = self._reducer.losses(lanes)
            if self._is_first_step:
                self._compare(before, _outputs_of(lanes, values), turn)
            if not twice:
                shares = self._shares.run(_outputs_of(lanes, values), loss, turn, what)
            seeds = [
                shares[lane.turn.lane].seed(lane.ran_on, of_lane) if lane.has_samples else _NO_SHARE
                for lane, of_lane in zip(lanes, values, strict=True)
            ]
            # The loss drew since the forward, or on several lanes another forward did.
            set_random_state(backward_seed(self._seed, turn.step, in_round[0].turn.lane))
            gradients.backward(seeds, what)
        self._is_first_step = False

    def close(self) -> None:
        """Stop the background work."""
        self._shares.close()

    def _runs_twice(self, turn: LaneTurn) -> bool:
        """Whether graphs are dropped: some process would keep several. The same on every rank."""
        most = max(self._gradients.placement.counts(turn.present))
        return self._reducer.forward_is_collective or most > len(self._reducer.replicas)

    def _forward(self, kept: StepBatches, loss: WholeLoss) -> list[LaneOutputs]:
        """Run each lane's forward, with gradients on, as the second one has them, and drop its graph."""
        outputs: list[LaneOutputs] = []
        batches = to_device(kept.copies(), self._gradients.world.device)
        for in_round in self._gradients.rounds(batches, has_backward=False):
            lanes = [_OutputLane(loss, batch, loss.lane(batch), keeps_graph=False) for batch in in_round]
            outputs += _outputs_of(lanes, self._reducer.forwards(lanes))
        return outputs

    def _compare(self, before: Sequence[LaneOutputs], again: Sequence[LaneOutputs], turn: LaneTurn) -> None:
        """Raise TaskError if the second forward of a lane gave other outputs than the first."""
        is_exact = self._gradients.equality == "exact"
        tolerance = {"rtol": 0.0, "atol": 0.0} if is_exact else {"rtol": 1e-2, "atol": 1e-4}
        first = {one.lane: one.values for one in before if one.num_samples}
        for second in (one for one in again if one.num_samples):
            pairs = zip(tensors_in(first[second.lane]), tensors_in(second.values), strict=True)
            if not all(torch.allclose(one, two.detach(), **tolerance, equal_nan=True) for one, two in pairs):
                raise TaskError(
                    f"lane {second.lane} of step {turn.step + 1} gave other outputs when its forward ran a "
                    "second time, from equal weights, buffers and random state: what it uses changed in "
                    "between. Keep nothing from one forward to the next. lanewise verify names what changed."
                )


def _outputs_of(lanes: Sequence[_OutputLane], values: Sequence[Any]) -> list[LaneOutputs]:
    """Return what the lanes of a round returned; of one without samples what tells its form, if anything."""
    return [
        LaneOutputs(lane.turn.lane, lane.batch.num_samples, of_lane)
        if lane.has_samples
        else LaneOutputs(lane.turn.lane, 0, map_tensors(_without_samples, of_lane))
        for lane, of_lane in zip(lanes, values, strict=True)
        if of_lane is not None
    ]


def _without_samples(tensor: torch.Tensor) -> torch.Tensor:
    return _without_graph(tensor)[:0] if tensor.dim() else tensor


def _without_graph(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without its graph, which still tells whether it had one."""
    return tensor.detach().requires_grad_(tensor.requires_grad)
