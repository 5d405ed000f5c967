"""A step of an optimizer that computes the gradient by itself, through a closure, as LBFGS and SAM do."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import torch

from lanewise.data import LaneBatch
from lanewise.engine.step.lanes import StepBatches
from lanewise.engine.step.metrics import Gradient, StepReport
from lanewise.engine.step.step import TrainStep
from lanewise.engine.step.update import explain


@final
@dataclass
class ClosureStep:
    """Takes steps with a closure, each call of which makes a pass over the lanes.

    All passes use the same samples and random numbers, so that a line search evaluates one function. SAM
    finds the gradient before it calls the closure.
    """

    step: TrainStep

    def run(self, step: int, batches: Iterator[LaneBatch]) -> StepReport:
        """Collective."""
        training, kept = self.step.training, StepBatches(batches)
        self.step.runner.seed_update(step)
        found: list[Gradient] = []

        def closure() -> torch.Tensor:
            found.append(self.step.gradient(step, kept.copies()))
            return torch.tensor(found[-1].totals.loss, dtype=torch.float64)

        if training.closure:
            closure()
            if not found[0].allows_update:
                return self.step.end(found[0])
        try:
            training.optimizer.step(closure)  # type: ignore[arg-type]  # torch's says that it gives a float
        except Exception as error:
            explain(error, training.optimizer, has_closure=True)
            raise
        return self.step.end(found[0])
