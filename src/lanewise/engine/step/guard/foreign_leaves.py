"""Refuses a loss that depends on weights which are no part of the model, so that nobody would train them."""

import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import final

import torch
from torch import nn

from lanewise.engine.step.guard.look import Look
from lanewise.engine.step.terms import LaneLoss
from lanewise.engine.step.totals import StepTotals
from lanewise.errors import TaskError
from lanewise.lanes import LaneTurn
from lanewise.reduce import Reducer


@final
class ForeignLeaves(Look):
    """Walks the graphs of the first step's losses to the tensors that get a gradient.

    Each must be a parameter of a prepared model, or a tensor that the lane's forward made, such as an input
    by which forces or a gradient penalty are computed. A plain tensor that comes again in another lane was
    not made by the forward; so where there are any, the second step is looked at too.

    Args:
        reducer: holds the model.
        models: all modules whose parameters the user trains; more than one in a loop of one's own.
        others: further parameters that the user holds, by name, for the error message.
    """

    def __init__(
        self, reducer: Reducer, models: Collection[nn.Module], others: Mapping[str, nn.Parameter]
    ) -> None:
        self._reducer = reducer
        self._models = models
        self._others = others
        self._seen: list[weakref.ref[torch.Tensor]] = []
        self._num_steps = 0
        self._has_walked = False

    def after_forward(self, turn: LaneTurn, loss: LaneLoss | None) -> None:
        root = None if loss is None else loss.root(turn, 1.0)[0]
        if root is not None:
            self.after_common(root, f"the loss of lane {turn.lane} in step {turn.step + 1}", ())

    def after_common(self, loss: torch.Tensor, what: str, given: Sequence[torch.Tensor]) -> None:
        """Raise TaskError if a loss depends on a tensor that would get a gradient, and that nobody trains."""
        self._has_walked = True
        modules = (*self._models, *self._reducer.replicas)
        known: set[torch.Tensor] = {parameter for module in modules for parameter in module.parameters()}
        known.update(given, self._reducer.gathered_parameters())
        for leaf in _leaves(loss):
            if leaf in known:
                continue
            if not isinstance(leaf, nn.Parameter) and all(seen() is not leaf for seen in self._seen):
                self._seen.append(weakref.ref(leaf))
                continue
            names = (name for name, parameter in self._others.items() if parameter is leaf)
            kind = "a parameter" if isinstance(leaf, nn.Parameter) else "a tensor"
            raise TaskError(
                f"{what} depends on {next(names, f'{kind} of shape {tuple(leaf.shape)}')}, which needs a "
                "gradient and is in no model that is trained, so it would never be updated. Make it a "
                "parameter of the module that build_model returns, or of one that a loop of your own "
                "prepares; freeze it with requires_grad_(False) if it is to stay as it is. An input by which "
                "the forward differentiates is made in the forward: inputs.detach().requires_grad_()."
            )

    def finish(self, totals: StepTotals) -> bool:
        self._num_steps += self._has_walked
        return self._num_steps > bool(self._seen)


def _leaves(loss: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors that a backward of the loss would give a gradient to."""
    if loss.grad_fn is None:
        yield loss
        return
    waiting, seen = [loss.grad_fn], {loss.grad_fn}
    while waiting:
        node = waiting.pop()
        variable = getattr(node, "variable", None)
        if isinstance(variable, torch.Tensor):
            yield variable
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
