"""Notices forwards that talk to other processes, as SyncBatchNorm does."""

import logging

from lanewise.config import Equality
from lanewise.errors import TaskError
from lanewise.lanes import LaneTurn, lane_ranges
from lanewise.reduce.fsdp import FSDPReducer
from lanewise.reduce.reducer import Reducer
from lanewise.world.world import World

logger = logging.getLogger(__name__)

_REMEDY = (
    "In place of SyncBatchNorm use BatchNorm, whose statistics are merged over the lanes after each step; "
    "lanewise verify names what else talks."
)


class Crosstalk:
    """Watches the first step for collectives in a forward or a loss.

    A lane's result then depends on the lanes that run beside it, and so on the number of processes: in
    `close` a warning, in `exact` an error. In a step in which processes have different numbers of lanes some
    would wait for ever: an error before the first forward of that step. Under fsdp every forward talks, and
    nothing is watched.

    Args:
        reducer: runs the forwards.
        world: the processes.
        num_lanes: lanes of the run.
        equality: what the run promises.
    """

    def __init__(self, reducer: Reducer, world: World, num_lanes: int, equality: Equality) -> None:
        self._world = world
        self._lane_ranges = lane_ranges(num_lanes, world.world_size)
        self._equality = equality
        self._is_listening = not isinstance(reducer, FSDPReducer)
        self._is_heard = False

    def begin_step(self, turn: LaneTurn) -> None:
        """Raise TaskError where forwards talk and this step has unequally many lanes on the processes."""
        if not self._is_heard:
            return
        counts = {
            max(0, min(lanes.stop, turn.num_present_lanes) - lanes.start) for lanes in self._lane_ranges
        }
        if len(counts) > 1:
            raise TaskError(
                f"the forward of a lane talks to other processes, and in step {turn.step} these have "
                f"{max(counts)} and {min(counts)} lanes, so that some would wait for ever. Let the number of "
                f"processes divide the lanes, and set data.drop_last. {_REMEDY}"
            )

    def before_forward(self) -> None:
        """Begin to listen."""
        if self._is_listening:
            self._num_collectives = self._world.num_collectives()

    def after_forward(self, turn: LaneTurn) -> None:
        """Raise TaskError where something was said that may not be.

        The first lanes of all processes run together, so all of them come here.
        """
        if not self._is_listening or self._world.num_collectives() == self._num_collectives:
            return
        if self._equality == "exact":
            raise TaskError(
                "the forward or the loss of a lane talked to other processes, so its result depends on their "
                f"number, which exact rules out. {_REMEDY}"
            )
        self._is_heard, self._is_listening = True, False
        self.begin_step(turn)
        logger.warning(
            "the forward of a lane talks to other processes: results depend on their number. %s", _REMEDY
        )

    def end_first_step(self) -> None:
        """Listen no more."""
        self._is_listening = False
