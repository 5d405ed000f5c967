"""Finds random numbers that are drawn in a backward which several lanes share."""

import logging
from typing import final

from lanewise.config import Equality
from lanewise.engine.step.guard.look import Look
from lanewise.engine.step.message import StepTotals
from lanewise.engine.step.terms import LaneLoss
from lanewise.errors import TaskError
from lanewise.lanes import LaneTurn
from lanewise.processes.device.random_state import generator_states

logger = logging.getLogger(__name__)


@final
class SharedBackward(Look):
    """Looks whether a backward moved the generators of this process, where one backward serves several lanes.

    Which lane drew what then depends on how many devices the process has. What is drawn in a forward that
    activation checkpointing runs again in the backward is no such draw: the generators are put back.

    Args:
        equality: the grade: an error in `exact`, a warning in `close`.
        num_replicas: whose lanes have one backward.
    """

    def __init__(self, equality: Equality, num_replicas: int) -> None:
        self._equality = equality
        self._num_replicas = num_replicas
        self._in_round: list[LaneTurn] = []

    def after_forward(self, turn: LaneTurn, loss: LaneLoss | None) -> None:
        """See `Look`."""
        if len(self._in_round) == self._num_replicas:
            self._in_round = []
        self._in_round.append(turn)
        self._before = generator_states()

    def after_backward(self, turn: LaneTurn) -> None:
        """See `Look`. The backward of a round runs with its last lane."""
        moved = [name for name, state in generator_states().items() if state != self._before[name]]
        if len(self._in_round) < 2 or not moved:
            return
        message = (
            f"the backward of lanes {self._in_round[0].lane} to {turn.lane} in step {turn.step + 1} "
            f"drew random numbers from {', '.join(moved)}, which these lanes share, so that their numbers "
            "depend on how many devices this process has. Draw in the forward and keep the numbers for the "
            "backward, or use distributed.reducer=ddp."
        )
        if self._equality == "exact":
            raise TaskError(message)
        logger.warning("%s", message)

    def finish(self, totals: StepTotals) -> bool:
        """See `Look`."""
        self._in_round = []
        return True
