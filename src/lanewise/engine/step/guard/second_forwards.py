"""Refuses a forward that gives other outputs when it runs a second time."""

from collections.abc import Sequence
from typing import final

import torch

from lanewise.config import Equality
from lanewise.engine.step.guard.look import Look
from lanewise.engine.step.outputs import LaneOutputs
from lanewise.errors import TaskError
from lanewise.lanes import LaneTurn
from lanewise.processes.device.nested import tensors_in


@final
class SecondForwards(Look):
    """Compares the outputs of the two forwards of a lane, in the first step of a loss of all samples.

    Args:
        equality: the grade: in `close` the outputs may differ a little.
    """

    def __init__(self, equality: Equality) -> None:
        is_exact = equality == "exact"
        self._tolerance = {"rtol": 0.0, "atol": 0.0} if is_exact else {"rtol": 1e-2, "atol": 1e-4}

    def compare(self, before: Sequence[LaneOutputs], again: Sequence[LaneOutputs], turn: LaneTurn) -> None:
        """Raise TaskError if the second forward of a lane gave other outputs than the first."""
        first = {outputs.lane: outputs.values for outputs in before if outputs.num_samples}
        for second in (outputs for outputs in again if outputs.num_samples):
            for tensor, tensor_again in zip(
                tensors_in(first[second.lane]), tensors_in(second.values), strict=True
            ):
                if torch.allclose(tensor, tensor_again.detach(), **self._tolerance, equal_nan=True):
                    continue
                raise TaskError(
                    f"lane {second.lane} of step {turn.step + 1} gave other outputs when its forward ran a "
                    "second time, from equal weights, buffers and random state: what it uses changed in "
                    "between. Keep nothing from one forward to the next. lanewise verify names what changed."
                )
