"""Refuses gradients that did not come from the backward of a lane, and a change of what is trained."""

from typing import final

from lanewise.engine.step.guard.look import Look
from lanewise.engine.step.terms import LaneLoss
from lanewise.errors import TaskError
from lanewise.lanes import LaneTurn
from lanewise.reduce import Reducer
from lanewise.reduce.reducer import trained_parameters


@final
class ForeignGradients(Look):
    """Looks whether the forward or the loss of a lane called `backward`.

    Args:
        reducer: holds the model.
    """

    def __init__(self, reducer: Reducer) -> None:
        self._names = [
            name for name, parameter in reducer.model.named_parameters() if parameter.requires_grad
        ]
        self._trained = [
            parameter for replica in reducer.replicas for parameter in trained_parameters(replica)
        ]
        self._left: list[int | None] = []

    def begin(self, turn: LaneTurn) -> None:
        """No parameter has a gradient yet."""
        self._left = [None] * len(self._trained)

    def after_forward(self, turn: LaneTurn, loss: LaneLoss | None) -> None:
        for number, (now, left) in enumerate(zip(self._versions(), self._left, strict=True)):
            if now != left:
                raise TaskError(
                    f"parameter {self._names[number % len(self._names)]} got a gradient before the backward "
                    f"of lane {turn.lane} in step {turn.step + 1}: the forward or the loss calls backward(). "
                    "Return the whole loss to lanewise, which calls backward; inside of a loss use "
                    "torch.autograd.grad."
                )

    def after_backward(self, turn: LaneTurn) -> None:
        self._left = self._versions()

    def _versions(self) -> list[int | None]:
        return [None if parameter.grad is None else parameter.grad._version for parameter in self._trained]


@final
class TrainedParameters:
    """The rule that the same parameters are trained in each step.

    Args:
        reducer: holds the model.
    """

    def __init__(self, reducer: Reducer) -> None:
        self._all = [
            (name, parameter, parameter.requires_grad) for name, parameter in reducer.model.named_parameters()
        ]

    def __call__(self, turn: LaneTurn) -> None:
        """Raise TaskError if others are trainable than at the start."""
        for name, parameter, was_trainable in self._all:
            if parameter.requires_grad != was_trainable:
                raise TaskError(
                    f"the trainable parameters changed before step {turn.step + 1}: requires_grad of {name} "
                    f"was {was_trainable} at the start and is {parameter.requires_grad} now. "
                    "Leave requires_grad as build_model made it. A part that is to thaw later is trained "
                    "from the start, in a parameter group whose learning rate a scheduler holds at 0 until "
                    "then, with interval: epoch "
                    "(docs/task.md#a-backbone-that-is-frozen-in-the-first-epochs)."
                )
