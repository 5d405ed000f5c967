"""What a task does before and after the update of a step, on every process."""

from typing import Any, final

import torch
from torch import nn

from lanewise.engine.step.guard.equal_state import require_equal
from lanewise.engine.step.lanes import LaneRunner
from lanewise.engine.step.metrics import Gradient
from lanewise.errors import ConfigError, TaskError, noting, text_of
from lanewise.lanes import after_update_seed, before_update_seed
from lanewise.processes.device.random_state import set_random_state
from lanewise.processes.world.shards import is_sharded
from lanewise.processes.world.world import World
from lanewise.task import Task, UpdatedStep

_SEEDS = {"before_update": before_update_seed, "after_update": after_update_seed}


def own_updates(task: Task) -> list[str]:
    """Name the methods by which a task does something before or after an update."""
    return [name for name in _SEEDS if getattr(type(task), name) is not getattr(Task, name)]


@final
class OwnUpdate:
    """Calls a method of a task once for a gradient or an update, and refuses what it must not do.

    Args:
        runner: has the task.
        model: the module on the first device.
        world: the processes, between which the gradients of the first call are compared.
        name: of the method.

    Raises:
        ConfigError: if the method gets the gradient, and each process has a part of it only.
    """

    def __init__(self, runner: LaneRunner, model: nn.Module, world: World, name: str) -> None:
        self._task, self._seed = runner.task, runner.seed
        self._model, self._world, self._name = model, world, name
        self._is_to_compare = name == "before_update"
        if self._is_to_compare and any(map(is_sharded, model.parameters())):
            raise ConfigError(
                "distributed.reducer fsdp gives each process a part of the gradient, and before_update of "
                f"{type(self._task).__name__} needs the whole one, as for the norm of a layer. Use "
                "distributed.reducer=ddp, where shard_optimizer=true shares out the optimizer's state."
            )

    def __call__(self, gradient: Gradient) -> None:
        """Call it in a step. Collective the first time.

        Raises:
            TaskError: if it replaces or reshapes a parameter or a buffer, or leaves other gradients than on
                another process.
        """
        totals, turn = gradient.totals, gradient.turn
        assert totals.joined is not None
        num_samples, gathered, joined_totals = totals.joined
        numbers = totals.loss, totals.weight, num_samples
        step = UpdatedStep(gathered, joined_totals, *numbers, self._task.progress)
        set_random_state(_SEEDS[self._name](self._seed, turn.step))
        before = self._forms()
        with torch.no_grad(), noting(lambda: f"in {self._name} of step {turn.step + 1}"):
            try:
                getattr(self._task, self._name)(self._model, step)
            except RuntimeError as error:
                if "DTensor" in text_of(error):
                    error.add_note(
                        "Under distributed.reducer fsdp a parameter is a DTensor, which cannot be mixed with "
                        "plain tensors. Compute with DTensors alone (lerp_, clamp_), or keep what is mixed "
                        "with gathered rows in a buffer, which every process has whole."
                    )
                raise
        now = self._forms()
        for name in [*before, *now]:
            if before.get(name) != now.get(name):
                raise TaskError(
                    f"{self._name} replaced {name}, or gave it another shape, in step {turn.step + 1}. The "
                    "optimizer, other processes and checkpoints have the old one. Write into it in place "
                    "(copy_, lerp_), and register it in build_model with the shape that it keeps."
                )
        if self._is_to_compare:
            self._is_to_compare = False
            named = {f"gradient of {name}": one.grad for name, one in self._model.named_parameters()}
            require_equal(named, self._world, turn.step)

    def _forms(self) -> dict[str, Any]:
        """Return the forms, which must be as they were."""
        kept: dict[str, Any] = {}
        for name, parameter in self._model.named_parameters():
            kept[f"parameter {name}"] = id(parameter), parameter.shape
        for name, buffer in self._model.named_buffers():
            kept[f"buffer {name}"] = buffer.shape, buffer.dtype
        return kept
