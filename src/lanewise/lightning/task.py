"""The task that trains a LightningModule."""

import copy
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple, final

from torch import nn
from torchmetrics import Metric

from lanewise.adapt.optimizer import BuiltOptimizer
from lanewise.errors import TaskError
from lanewise.lightning.step import StepKind, Stepped, TrainerThere, prepared
from lanewise.metrics import load_merged, set_aside
from lanewise.task import Loss, Task


class CollatedBatch(NamedTuple):
    """A micro-batch."""

    data: Any
    num_samples: int


@final
class ModuleParts(SimpleNamespace):
    """What a task keeps of a module and its data; opaque, so that no configuration lists the samples."""

    module: nn.Module
    trainer: TrainerThere
    train_dataset: Any
    eval_datasets: dict[str, Any]
    collate: Callable[[Any], Any]
    optimizer: BuiltOptimizer
    metrics: dict[str, Metric]
    """What validation_step logs, by name."""


@final
class ModuleTask(Task):
    """Trains a LightningModule.

    Args:
        parts: what was read.
    """

    def __init__(self, parts: ModuleParts) -> None:
        self._parts = parts

    def build_model(self) -> nn.Module:
        """Return a copy of the module, with its weights."""
        return prepared(self._parts.module, self._parts.trainer)  # type: ignore[no-any-return]

    def train_dataset(self) -> Any:
        """Return that of the loader."""
        return self._parts.train_dataset

    def eval_datasets(self) -> Mapping[str, Any]:
        """Return that of the validation loader as `val`, if there is one."""
        return self._parts.eval_datasets

    def collate(self, samples: Any) -> CollatedBatch:
        """Collate as the loader does."""
        return CollatedBatch(self._parts.collate(list(samples)), len(samples))

    def forward(self, model: nn.Module, batch: CollatedBatch) -> Stepped:
        """Call training_step."""
        return Stepped(*model(StepKind.TRAINING, *batch))

    def loss(self, outputs: Stepped, batch: CollatedBatch) -> Loss:
        """Return what training_step returned, and what it logged."""
        loss = loss_of(outputs.returned, batch.num_samples)
        if loss is None:
            raise TaskError("training_step returned None. Return a loss for each micro-batch.")
        logged = {name: (value * weight, weight) for name, (value, weight) in outputs.values.items()}
        logged.pop("loss", None)  # which is the trainer's
        return Loss(loss.sum, loss.weight, metrics={**logged, **(loss.metrics or {})})

    def parameter_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Return the groups of the optimizer that configure_optimizers returned."""
        return self._parts.optimizer.parameter_groups(model)

    def eval_forward(self, model: nn.Module, batch: CollatedBatch) -> Stepped:
        """Call validation_step."""
        return Stepped(*model(StepKind.VALIDATION, *batch))

    def eval_loss(self, outputs: Stepped, batch: CollatedBatch) -> Loss | None:
        """Return what validation_step returned; None where it only logs, or logs `loss` itself."""
        logs_loss = "loss" in {*outputs.values, *outputs.states}
        return None if logs_loss else loss_of(outputs.returned, batch.num_samples)

    def build_metrics(self) -> Mapping[str, Metric]:
        """Return metrics for what validation_step logs."""
        return {name: copy.deepcopy(metric) for name, metric in self._parts.metrics.items()}

    def update_metrics(self, metrics: Mapping[str, Metric], outputs: Stepped, batch: CollatedBatch) -> None:
        """Add what validation_step logged of a micro-batch."""
        if unknown := sorted({*outputs.values, *outputs.states} - metrics.keys()):
            raise TaskError(
                f"validation_step logs {unknown[0]}, which it did not in its first call. Log it in each."
            )
        for name, (value, weight) in outputs.values.items():
            metrics[name].update(value, weight)
        for name, states in outputs.states.items():
            counted = {name: metrics[name]}
            before = set_aside(metrics[name])
            load_merged(counted, [{name: before}, {name: states}][not before[0] :])


def loss_of(returned: Any, num_samples: int) -> Loss | None:
    """Return the loss that a step returned; a bare one is a mean over the samples."""
    loss = returned.get("loss") if isinstance(returned, Mapping) else returned
    if loss is None or isinstance(loss, Loss):
        return loss
    return Loss.mean(loss, num_samples)
