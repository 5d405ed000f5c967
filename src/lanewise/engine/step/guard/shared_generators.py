"""Finds random numbers that several lanes draw from one generator, at once or in a backward which they share.

[Note: generators and threads]
Where the lanes of a round run in threads, each has the generator of its device, and all have those of the
host. Each thread seeds these when its forward begins, so what a lane draws from them depends on which thread
was faster. A second run of a forward in the backward (activation checkpointing) sets the state that torch's
generator had in the first one, and then puts back the state that it found, also in a thread for each device:
if two of these overlap, what is left is not what was there before the backward, though nobody drew. But it is
a state in which that generator was seeded. So what tells a draw is whether the generator left such a state.
"""

import logging
from typing import final

from lanewise.config import Equality
from lanewise.engine.step.guard.look import Look
from lanewise.engine.step.terms import LaneLoss
from lanewise.engine.step.totals import StepTotals
from lanewise.errors import TaskError
from lanewise.lanes import LaneTurn
from lanewise.processes.device.random_state import generator_states, host_generators_drew
from lanewise.reduce import Reducer

logger = logging.getLogger(__name__)


@final
class SharedGenerators(Look):
    """Looks whether lanes that run at once, or have one backward, draw from the same generators.

    Which lane drew what then depends on how many devices the process has. What is drawn in a forward that
    activation checkpointing runs again in the backward is no such draw: the generators are put back.

    Args:
        equality: the grade: an error in `exact`, a warning in `close`.
        reducer: whose replicas run several lanes at once, with one backward.
    """

    def __init__(self, equality: Equality, reducer: Reducer) -> None:
        self._equality = equality
        self._reducer = reducer
        self._in_round: list[LaneTurn] = []

    def begin(self, turn: LaneTurn) -> None:
        self._in_round = []

    def after_forward(self, turn: LaneTurn, loss: LaneLoss | None) -> None:
        """The forwards of the whole round have run."""
        if len(self._in_round) == len(self._reducer.replicas):
            self._in_round = []
        self._in_round.append(turn)
        self._before = self._states()
        if self._reducer.runs_at_once and len(self._in_round) == 1:
            self._complain(
                f"forward or loss of lane {turn.lane}, or of one that runs beside it,",
                [name for name, has_drawn in host_generators_drew().items() if has_drawn],
                "Draw in the dataset or in collate, draw on the lane's device,",
            )

    def after_backward(self, turn: LaneTurn) -> None:
        """The backward of a round runs with its last lane."""
        if len(self._in_round) > 1:
            self._complain(
                f"the backward of lanes {self._in_round[0].lane} to {turn.lane}",
                [name for name, state in self._states().items() if state != self._before[name]],
                "Draw in the forward and keep the numbers for the backward,",
            )

    def finish(self, totals: StepTotals) -> bool:
        return True

    def _states(self) -> dict[str, object]:
        """Return what a draw changes. See [Note: generators and threads]."""
        return generator_states() | (host_generators_drew() if self._reducer.runs_at_once else {})

    def _complain(self, what: str, names: list[str], remedy: str) -> None:
        if not names:
            return
        step = self._in_round[-1].step + 1
        message = (
            f"{what} in step {step} drew random numbers from {', '.join(names)}, which these lanes share, so "
            f"that their numbers depend on how many devices this process has. {remedy} or use "
            "distributed.reducer=ddp."
        )
        if self._equality == "exact":
            raise TaskError(message)
        logger.warning("%s", message)
