"""Finds random numbers that are drawn in a backward which several lanes share."""

import logging
from collections.abc import Sequence
from typing import final

import torch

from lanewise.config import Equality
from lanewise.engine.step.look import Look
from lanewise.errors import TaskError
from lanewise.lanes import LaneTurn
from lanewise.random_state import generator_states

logger = logging.getLogger(__name__)


@final
class SharedBackward(Look):
    """Looks whether a backward moved the generators of this process, where one backward serves several lanes.

    Which lane drew what then depends on how many devices the process has. What is drawn in a forward that
    activation checkpointing runs again in the backward is no such draw: the generators are put back.

    Args:
        equality: the grade: an error in `exact`, a warning in `close`.
    """

    def __init__(self, equality: Equality) -> None:
        self._equality = equality

    def before_backward(self, in_round: Sequence[LaneTurn], losses: Sequence[torch.Tensor | None]) -> None:
        """See `Look`."""
        self._before = generator_states()

    def after_backward(self, in_round: Sequence[LaneTurn]) -> None:
        """See `Look`."""
        moved = [name for name, state in generator_states().items() if state != self._before[name]]
        if len(in_round) < 2 or not moved:
            return
        message = (
            f"the backward of lanes {in_round[0].lane} to {in_round[-1].lane} in step {in_round[0].step + 1} "
            f"drew random numbers from {', '.join(moved)}, which these lanes share, so that their numbers "
            "depend on how many devices this process has. Draw in the forward and keep the numbers for the "
            "backward, or use distributed.reducer=ddp."
        )
        if self._equality == "exact":
            raise TaskError(message)
        logger.warning("%s", message)
