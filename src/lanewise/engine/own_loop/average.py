"""The average of the weights of a model in the user's own loop."""

from typing import Any, final

from torch import nn
from torch.optim.swa_utils import AveragedModel

from lanewise.engine.own_loop.steps import Step
from lanewise.engine.step.average import update_average


@final
class Average:
    """The exponential moving average of a prepared model; `lanes.average` returns it.

    A checkpoint holds it as any other object: `lanes.checkpoints(folder, model=model, average=average)`.
    """

    def __init__(self, average: AveragedModel, model: nn.Module) -> None:
        self._average, self._model = average, model

    @property
    def module(self) -> nn.Module:
        """The module with the averaged weights, to be evaluated and saved."""
        module: nn.Module = self._average.module
        return module

    def update(self, step: Step) -> None:
        """Add the model, after `optimizer.step()` and before the next pass of the step.

        Nothing happens where the last pass of the step allowed no update.
        """
        if step.allows_update:
            update_average(self._average, self._model)

    def state_dict(self) -> dict[str, Any]:
        """Return its state for a checkpoint."""
        return self._average.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore it."""
        self._average.load_state_dict(state)
