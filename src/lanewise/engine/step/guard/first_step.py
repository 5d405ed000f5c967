"""Says what the first step shows: the unit of the loss's weights, and the parameters that no lane uses."""

import logging
from typing import Any, final

import torch

from lanewise.engine.step.guard.look import Look
from lanewise.engine.step.target_mean import RETURN_SUM, target_means
from lanewise.engine.step.terms import SAMPLES, LaneLoss
from lanewise.engine.step.totals import StepTotals
from lanewise.engine.transforms import compare_runs
from lanewise.errors import TaskError
from lanewise.lanes import LaneTurn
from lanewise.processes.world.world import World
from lanewise.reduce import Reducer

logger = logging.getLogger(__name__)
_TERMS = ("Add", "Sub", "Mul", "Neg", "ToCopy", "View")
"""How the nodes are called of which a loss is a sum where all below them are."""


@final
class FirstStep(Look):
    """Logs what the first step shows; until then checkpointed blocks compare their two runs.

    Args:
        reducer: holds the model.
        world: the processes.
    """

    def __init__(self, reducer: Reducer, world: World) -> None:
        self._reducer = reducer
        self._world = world
        self._unit: str | None = None
        self._over = ""
        """What a bare loss is divided by, where that is not the number of its targets."""
        self._used: set[str] = set()
        self._hooks = reducer.register_hooks(self._note_use)

    def after_forward(self, turn: LaneTurn, loss: LaneLoss | None) -> None:
        if loss is None or loss.value is None or not loss.weight:
            return
        is_bare, is_first, self._unit = loss.unit is SAMPLES, self._unit is None, self._unit or loss.unit
        if is_bare and loss.share is None and not self._over:
            means = [over for over, _ in target_means(loss.value)]
            if len(means) == 1 or len(means) != loss.weight:  # else each is of a sample
                self._over = next(filter(None, means), "")
        if is_bare and is_first and not self._world.rank and _is_sum(loss.value):
            logger.warning(
                "the loss is computed as a sum, and taken as the mean over a micro-batch's samples. If "
                "it adds them up, return lanewise.Loss(sum, weight)"
            )

    def finish(self, totals: StepTotals) -> bool:
        """Collective."""
        for hook in self._hooks:
            hook.remove()
        compare_runs(self._reducer.replicas, is_on=False)
        of_ranks = self._world.all_gather_tree((sorted(self._used), self._over))
        used = set().union(*(names for names, _ in of_ranks))
        if self._world.rank:
            return True
        logger.info(
            "loss and gradient of a step are means over %s; the first step has %s",
            self._unit or "its units",
            f"{totals.weight:,g}",
        )
        if over := next(filter(None, (over for _, over in of_ranks)), ""):
            logger.warning(
                "the loss is a mean over %s, and taken as one over samples, as if each micro-batch had as "
                "much of them. %s",
                over,
                RETURN_SUM,
            )
        named = self._reducer.model.named_parameters()
        if unused := [name for name, parameter in named if parameter.requires_grad and name not in used]:
            logger.warning(
                "no lane of the first step used these parameters, so that only weight decay moves them: %s",
                ", ".join(unused),
            )
        return True

    def _note_use(self, name: str, parameter: torch.Tensor) -> None:
        if parameter.grad is None:  # the lane contributes nothing
            return
        if parameter.grad.layout != torch.strided:
            raise TaskError(
                f"parameter {name} has a sparse gradient, which cannot be added up over lanes. "
                "Use a dense one, for example nn.Embedding(sparse=False)."
            )
        self._used.add(name)


def _is_sum(loss: torch.Tensor) -> bool:
    """Tell by its graph whether a loss is made of torch's sums alone; of other functions nobody knows.

    The sum over what was averaged or stacked along its first dimension may be one of terms.
    """
    waiting = {loss.grad_fn}
    while waiting:
        node: Any = waiting.pop()
        (under, _), *_ = node.next_functions or [(None, 0)]
        adds = node.name().startswith("Sum") and getattr(under, "_saved_dim", 1) not in (0, (0,))
        if node.name().startswith(_TERMS):
            waiting.update(below for below, _ in node.next_functions if below is not None)
        elif not adds and getattr(node, "_saved_reduction", 1) != 2:  # which stands for a sum
            return False
    return True
