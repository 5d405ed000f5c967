"""What a task does after the update of a step, on every process."""

from typing import Any, final

import torch
from torch import nn

from lanewise.engine.step.lanes import LaneRunner
from lanewise.engine.step.metrics import Gradient
from lanewise.errors import TaskError, noting, text_of
from lanewise.lanes import after_update_seed
from lanewise.processes.device.random_state import set_random_state
from lanewise.task import Task, UpdatedStep


def has_after_update(task: Task) -> bool:
    """Tell whether a task does something after an update."""
    return type(task).after_update is not Task.after_update


@final
class OwnUpdate:
    """Calls `Task.after_update`, and refuses what it must not do.

    Args:
        runner: has the task.
        model: the module on the first device.
    """

    def __init__(self, runner: LaneRunner, model: nn.Module) -> None:
        self._task, self._seed = runner.task, runner.seed
        self._model = model

    def __call__(self, gradient: Gradient) -> None:
        """Call it after a step.

        Raises:
            TaskError: if it replaces or reshapes a parameter or a buffer.
        """
        totals, turn = gradient.totals, gradient.turn
        assert totals.joined is not None
        num_samples, gathered, joined_totals = totals.joined
        numbers = totals.loss, totals.weight, num_samples
        step = UpdatedStep(gathered, joined_totals, *numbers, self._task.progress)
        set_random_state(after_update_seed(self._seed, turn.step))
        before = self._look()
        with torch.no_grad(), noting(lambda: f"in after_update of step {turn.step + 1}"):
            try:
                self._task.after_update(self._model, step)
            except RuntimeError as error:
                if "DTensor" in text_of(error):
                    error.add_note(
                        "Under distributed.reducer fsdp a parameter is a DTensor, which cannot be mixed with "
                        "plain tensors. Compute with DTensors alone (lerp_, clamp_), or keep what is mixed "
                        "with gathered rows in a buffer, which every process has whole."
                    )
                raise
        now = self._look()
        for name in [*before, *now]:
            if before.get(name) != now.get(name):
                raise TaskError(
                    f"after_update replaced {name}, or gave it another shape, in step {turn.step + 1}. The "
                    "optimizer, other processes and checkpoints have the old one. Write into it in place "
                    "(copy_, lerp_), and register it in build_model with the shape that it keeps."
                )

    def _look(self) -> dict[str, Any]:
        """Return the forms, which must be as they were."""
        kept: dict[str, Any] = {}
        for name, parameter in self._model.named_parameters():
            kept[f"parameter {name}"] = id(parameter), parameter.shape
        for name, buffer in self._model.named_buffers():
            kept[f"buffer {name}"] = buffer.shape, buffer.dtype
        return kept
