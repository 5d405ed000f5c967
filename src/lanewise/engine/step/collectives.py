"""Detects forwards that communicate with other processes, as SyncBatchNorm does."""

import logging

from torch import nn

from lanewise.config import Equality
from lanewise.errors import TaskError
from lanewise.lanes import LaneTurn, Placement
from lanewise.reduce import Reducer
from lanewise.world.world import World

logger = logging.getLogger(__name__)

_REMEDY = (
    "Instead of SyncBatchNorm use BatchNorm, whose statistics are merged over the lanes after each step; "
    "lanewise verify names any other collective."
)


class CollectiveDetector:
    """Detects collectives in a forward or a loss in the first step.

    With one, a lane's result depends on the lanes that run beside it, and so on the number of processes: this
    is a warning in `close` and an error in `exact`. In a step in which processes have different numbers of
    lanes some would wait forever, so that is an error before the first forward of the step. torch's
    SyncBatchNorm is known before the first step. Under fsdp every forward is a collective, and nothing is
    detected.

    `before_forward` and `after_forward` are for the first step alone.

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
            and any(isinstance(module, nn.SyncBatchNorm) for module in reducer.replicas[0].modules())
        )
        self._has_collectives = self._is_synchronised and equality == "close"

    def begin_step(self, turn: LaneTurn) -> None:
        """Raise TaskError where forwards communicate and processes have unequally many lanes in this step."""
        if not self._has_collectives:
            return
        counts = set(self._placement.counts(turn.num_present_lanes))
        if len(counts) > 1:
            raise TaskError(
                "the forward of a lane communicates with other processes, and in step "
                f"{turn.step} these have {max(counts)} and {min(counts)} lanes, so that some would wait "
                "forever. Let the number of processes divide the lanes, and set data.drop_last. "
                f"{_REMEDY}"
            )

    def before_forward(self) -> None:
        """Begin to count collectives."""
        if self._is_counting:
            self._num_collectives = self._world.num_collectives()

    def after_forward(self, turn: LaneTurn) -> None:
        """Raise TaskError if the forward or the loss began a collective that it may not begin.

        The first lanes of all processes run together, so all of them come here.
        """
        if not self._is_counting or self._world.num_collectives() == self._num_collectives:
            return
        if self._equality == "exact":
            raise TaskError(
                "the forward or the loss of a lane communicated with other processes, so its result depends "
                f"on their number, which exact rules out. {_REMEDY}"
            )
        self._has_collectives, self._is_counting = True, False
        self.begin_step(turn)
        logger.warning(
            "the forward of a lane communicates with other processes: results depend on their number. %s",
            _REMEDY,
        )

    def refuse_missing_backward(self, turn: LaneTurn) -> None:
        """Raise TaskError where SyncBatchNorm would wait for this lane, which contributes nothing."""
        if self._is_synchronised:
            raise TaskError(
                f"lane {turn.lane} has no samples in step {turn.step}, or a loss of weight 0, and so no "
                "backward, for which SyncBatchNorm would wait forever on the other processes. "
                f"Give every micro-batch something to learn from. {_REMEDY}"
            )
