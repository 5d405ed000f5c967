"""Notices parameters that training cannot work with, and names those that no lane uses."""

import torch

from lanewise.errors import TaskError
from lanewise.reduce.reducer import Reducer
from lanewise.world.world import World


class ParameterWatch:
    """Watches the parameters of the user's module.

    Args:
        reducer: has the module.
    """

    def __init__(self, reducer: Reducer) -> None:
        self._all = list(reducer.replicas[0].named_parameters())
        self._trainable = [parameter.requires_grad for _, parameter in self._all]
        self._used: set[str] = set()
        self._hooks = reducer.watch(self._note_use)

    def check(self, step: int) -> None:
        """Raise TaskError if other parameters are trainable than at the start."""
        for (name, parameter), was_trainable in zip(self._all, self._trainable, strict=True):
            if parameter.requires_grad != was_trainable:
                raise TaskError(
                    f"the trainable parameters changed before step {step}: requires_grad of {name} was "
                    f"{was_trainable} at the start and is {parameter.requires_grad} now. "
                    "Freeze parameters in build_model, and start a new run to train others."
                )

    def unused(self, world: World) -> list[str]:
        """Name the trainable parameters that no lane used in the steps so far, and stop watching for it.

        Collective: every rank must call this.
        """
        for hook in self._hooks:
            hook.remove()
        used = set().union(*world.all_gather_object(self._used))
        return [name for name, parameter in self._all if parameter.requires_grad and name not in used]

    def _note_use(self, name: str, parameter: torch.Tensor) -> None:
        if parameter.grad is None:  # reached through `reach_all` alone
            return
        if parameter.grad.layout != torch.strided:
            raise TaskError(
                f"parameter {name} has a sparse gradient, which cannot be added up over lanes. "
                "Use a dense one, for example nn.Embedding(sparse=False)."
            )
        self._used.add(name)
