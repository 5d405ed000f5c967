"""Detects misuse of the parameters by the user's code, and names the parameters that no lane uses."""

from collections.abc import Sequence
from typing import final

import torch

from lanewise.errors import TaskError
from lanewise.lanes import LaneTurn
from lanewise.reduce.reducer import Reducer, trained_parameters
from lanewise.world.world import World


@final
class ParameterMonitor:
    """Monitors the parameters of the user's module and of its replicas.

    Call `check` and `begin_step` once in each step, `before_backward` and `after_backward` in each round of
    lanes. All lanes of the first step are checked for a backward inside of the forward, and in later steps
    the first round of each process.

    Args:
        reducer: holds the module.
    """

    def __init__(self, reducer: Reducer) -> None:
        self._all = list(reducer.replicas[0].named_parameters())
        self._trainable = [parameter.requires_grad for _, parameter in self._all]
        self._trained = [one for replica in reducer.replicas for one in trained_parameters(replica)]
        self._left: list[int | None] | None = None
        self._used: set[str] = set()
        self._hooks = reducer.register_hooks(self._note_use)

    def check(self, step: int) -> None:
        """Raise TaskError if other parameters are trainable than at the start."""
        for (name, parameter), was_trainable in zip(self._all, self._trainable, strict=True):
            if parameter.requires_grad != was_trainable:
                raise TaskError(
                    f"the trainable parameters changed before step {step + 1}: requires_grad of {name} was "
                    f"{was_trainable} at the start and is {parameter.requires_grad} now. "
                    "Freeze parameters in build_model, and start a new run to train others."
                )

    def begin_step(self) -> None:
        """Begin a step, in which no parameter has a gradient yet."""
        self._left = [None] * len(self._trained)

    def before_backward(self, turn: LaneTurn) -> None:
        """Raise TaskError if a gradient did not come from the backward of a lane."""
        if self._left is not None and (now := self._gradient_versions()) != self._left:
            raise TaskError(
                f"parameter {self._name_of_first(now, self._left)} got a gradient before the backward of "
                f"lane {turn.lane} in step {turn.step + 1}: the forward or the loss calls backward(). Return "
                "the whole loss to lanewise, which calls backward; inside of a loss use torch.autograd.grad."
            )

    def after_backward(self) -> None:
        """Note the gradients that the backward of a round left."""
        self._left = self._gradient_versions() if self._hooks else None

    def unused(self, world: World) -> list[str]:
        """Return the names of the trainable parameters that no lane has used so far, and remove the hooks.

        Collective: every rank must call this.
        """
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        used = set().union(*world.all_gather_tree(sorted(self._used)))
        return [name for name, parameter in self._all if parameter.requires_grad and name not in used]

    def _note_use(self, name: str, parameter: torch.Tensor) -> None:
        if parameter.grad is None:  # the lane contributes nothing
            return
        if parameter.grad.layout != torch.strided:
            raise TaskError(
                f"parameter {name} has a sparse gradient, which cannot be added up over lanes. "
                "Use a dense one, for example nn.Embedding(sparse=False)."
            )
        self._used.add(name)

    def _gradient_versions(self) -> list[int | None]:
        return [None if one.grad is None else one.grad._version for one in self._trained]

    def _name_of_first(self, now: Sequence[int | None], before: Sequence[int | None]) -> str:
        """Return the name of the first parameter for which two lists differ."""
        number = next(
            number for number, pair in enumerate(zip(now, before, strict=True)) if pair[0] != pair[1]
        )
        trained = [name for name, parameter in self._all if parameter.requires_grad]
        return trained[number % len(trained)]
