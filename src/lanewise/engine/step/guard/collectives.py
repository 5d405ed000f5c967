"""Detects forwards that communicate with other processes, as SyncBatchNorm does."""

import logging
from typing import Any, final

from torch import nn

from lanewise.config import Equality
from lanewise.engine.step.guard.look import Look
from lanewise.engine.step.terms import LaneLoss
from lanewise.engine.step.totals import StepTotals
from lanewise.errors import TaskError
from lanewise.lanes import LaneTurn, Placement
from lanewise.processes.world.world import World
from lanewise.reduce import Reducer

logger = logging.getLogger(__name__)

_INSTEAD_OF_SYNC_BATCH_NORM = (
    "Instead of SyncBatchNorm use BatchNorm, whose statistics are merged over the lanes after each step."
)
_INSTEAD_OF_A_GATHER = (
    "What it gathers from other processes depends on their number. A loss that compares the samples of all "
    "lanes is a task's batch_loss, or step.batch_loss in a loop of your own (docs/losses.md); otherwise "
    "compute forward and loss from the lane's own samples. lanewise verify names the operator."
)


@final
class CollectiveDetector(Look):
    """Detects collectives in a forward or a loss in the first step.

    A collective makes a lane's result depend on the lanes that run at the same time, and so on the number of
    processes: this is a warning in `close` and an error in `exact`. A step in which the processes have
    different numbers of lanes raises an error before its first forward, since some would wait forever.
    torch's SyncBatchNorm is recognised before the first step. Under fsdp every forward is a collective, and
    nothing is detected.

    Args:
        reducer: runs the forwards.
        world: the processes.
        placement: who carries which lanes.
        equality: what the run promises.
    """

    def __init__(self, reducer: Reducer, world: World, placement: Placement, equality: Equality) -> None:
        self._world = world
        self._placement = placement
        self._equality = equality
        self._is_counting = not reducer.forward_is_collective
        self._is_synchronised = (
            world.world_size > 1
            and self._is_counting
            and any(isinstance(module, nn.SyncBatchNorm) for module in reducer.model.modules())
        )
        self._has_collectives = self._is_synchronised and equality == "close"
        self._remedy = _INSTEAD_OF_SYNC_BATCH_NORM if self._is_synchronised else _INSTEAD_OF_A_GATHER

    def require_even(self, turn: LaneTurn) -> None:
        """Raise TaskError if forwards communicate and the processes have different numbers of lanes."""
        if not self._has_collectives:
            return
        counts = set(self._placement.counts(turn.present))
        if len(counts) > 1:
            raise TaskError(
                "the forward of a lane communicates with other processes, and in step "
                f"{turn.step + 1} these have {max(counts)} and {min(counts)} lanes, so that some would wait "
                "forever. Let the number of processes divide the lanes, and set data.drop_last. "
                f"{self._remedy}"
            )

    def before_forward(self, turn: LaneTurn, lane: Any) -> None:
        """Begin to count collectives."""
        if self._is_counting:
            self._num_collectives = self._world.num_collectives()

    def after_forward(self, turn: LaneTurn, loss: LaneLoss | None) -> None:
        """Warn, or raise TaskError, if the forward or the loss began a collective.

        The first lanes of all processes run at the same time, so every process finds it.
        """
        if self._is_synchronised and loss is not None and loss.root(turn, 1.0)[0] is None:
            self._refuse_missing_backward(turn)
        if not self._is_counting or self._world.num_collectives() == self._num_collectives:
            return
        if self._equality == "exact":
            raise TaskError(
                "the forward or the loss of a lane communicated with other processes, so its result depends "
                f"on their number, which exact rules out. {self._remedy}"
            )
        self._has_collectives, self._is_counting = True, False
        self.require_even(turn)
        logger.warning(
            "the forward of a lane communicates with other processes: results depend on their number. %s",
            self._remedy,
        )

    def finish(self, totals: StepTotals) -> bool:
        """With SyncBatchNorm every lane of every step needs a backward."""
        self._is_counting = False
        return not self._is_synchronised

    def _refuse_missing_backward(self, turn: LaneTurn) -> None:
        """Raise TaskError: the other processes would wait for this lane's backward."""
        raise TaskError(
            f"lane {turn.lane} has no samples in step {turn.step + 1}, or a loss of weight 0 without a "
            "gradient, and so no backward, for which SyncBatchNorm would wait forever on the other "
            f"processes. Give every micro-batch something to learn from. {self._remedy}"
        )
