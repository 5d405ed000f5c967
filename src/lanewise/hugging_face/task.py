"""The task that trains what a Trainer of transformers holds."""

import copy
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple, final

import torch
from torch import nn
from torchmetrics import Metric
from transformers import PreTrainedModel

from lanewise.adapt.optimizer import BuiltOptimizer
from lanewise.errors import TaskError
from lanewise.hugging_face.predictions import EvalPredictions
from lanewise.task import Loss, Task

METRICS = "metrics"
"""The name of what `compute_metrics` returns: `eval/metrics/accuracy`."""


class CountedBatch(NamedTuple):
    """A micro-batch."""

    inputs: dict[str, Any]
    """What the model takes."""
    num_targets: int
    """Over how many targets its loss is a mean."""


@final
class TrainerParts(SimpleNamespace):
    """What a task keeps of a trainer; opaque, so that no configuration lists the samples."""

    model: nn.Module
    train_dataset: Any
    eval_datasets: dict[str, Any]
    collator: Callable[[Any], Any]
    optimizer: BuiltOptimizer
    loss_function: Callable[..., torch.Tensor] | None
    """`compute_loss_func`, or the label smoother; None: the model's own loss."""
    takes_count: bool
    """Whether the loss divides by `num_items_in_batch`, and not by the targets of a micro-batch."""
    counts: str
    """A name of `NUM_TARGETS`."""
    compute_metrics: Callable[[Any], dict[str, float]] | None
    preprocess: Callable[[Any, Any], Any] | None
    label_names: list[str]
    ignored_keys: list[str]

    def loss(self, outputs: Any, inputs: Mapping[str, Any], num_items: torch.Tensor) -> torch.Tensor:
        """Return the loss that the Trainer's `compute_loss` makes of a model's outputs."""
        if self.loss_function is not None:
            loss: torch.Tensor = self.loss_function(
                outputs, inputs.get("labels"), num_items_in_batch=num_items
            )
            return loss
        return own_loss(outputs)

    def forward(self, model: nn.Module, inputs: Mapping[str, Any], num_items: torch.Tensor) -> Any:
        """Return the outputs, with the arguments that the Trainer's `compute_loss` gives to a model."""
        given = dict(inputs)
        if self.loss_function is not None:
            given.pop("labels", None)
        elif self.takes_count:
            given["num_items_in_batch"] = num_items
        return model(**given)


@final
class TrainerTask(Task):
    """Trains the model of a Trainer on its data.

    Args:
        parts: what was read off it.
    """

    def __init__(self, parts: TrainerParts) -> None:
        self._parts = parts

    def build_model(self) -> nn.Module:
        """Return a copy of the trainer's model, with its weights."""
        model = copy.deepcopy(self._parts.model)
        for module in model.modules():
            if isinstance(module, PreTrainedModel):
                # The library records hidden states for classes alone that it has constructed in a process.
                PreTrainedModel.__init__(type(module).__new__(type(module)), copy.deepcopy(module.config))
        return model

    def train_dataset(self) -> Any:
        """Return the trainer's dataset, without columns that the model does not take."""
        return self._parts.train_dataset

    def eval_datasets(self) -> Mapping[str, Any]:
        """Return those of the trainer by name; `eval` where it has one without a name."""
        return self._parts.eval_datasets

    def collate(self, samples: Any) -> CountedBatch:
        """Collate as the trainer does, and count the targets."""
        inputs = dict(self._parts.collator(list(samples)))
        return CountedBatch(inputs, NUM_TARGETS[self._parts.counts](inputs, len(samples)))

    def forward(self, model: nn.Module, batch: CountedBatch) -> Any:
        """Return the model's outputs."""
        return self._parts.forward(model, batch.inputs, _divisor(batch.inputs))

    def loss(self, outputs: Any, batch: CountedBatch) -> Loss:
        """Return the sum of the losses of the targets, and their number."""
        value = self._parts.loss(outputs, batch.inputs, _divisor(batch.inputs))
        return (Loss if self._parts.takes_count else Loss.mean)(value, batch.num_targets)

    def parameter_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Return the groups of the trainer's optimizer."""
        return self._parts.optimizer.parameter_groups(model)

    def build_metrics(self) -> Mapping[str, Metric]:
        """Return what collects predictions for the trainer's `compute_metrics`, if it has one."""
        compute = self._parts.compute_metrics
        return {} if compute is None else {METRICS: EvalPredictions(compute)}

    def update_metrics(self, metrics: Mapping[str, Metric], outputs: Any, batch: CountedBatch) -> None:
        """Give it the logits and labels of a micro-batch."""
        if not metrics:
            return
        labels = tuple(batch.inputs.get(name) for name in self._parts.label_names)
        left_out = {*self._parts.ignored_keys, "loss"}
        named = outputs.items() if isinstance(outputs, Mapping) else enumerate(outputs[1:])
        logits = tuple(value for name, value in named if name not in left_out)
        if not labels or any(label is None for label in labels):
            raise TaskError(
                f"compute_metrics needs labels, and a micro-batch lacks some of {self._parts.label_names}."
            )
        predictions = logits[0] if len(logits) == 1 else logits
        if self._parts.preprocess is not None:
            predictions = self._parts.preprocess(predictions, labels[0] if len(labels) == 1 else labels)
        metrics[METRICS].update(predictions, labels)


def own_loss(outputs: Any) -> torch.Tensor:
    """Return the loss that a model computed."""
    return outputs["loss"] if isinstance(outputs, Mapping) else outputs[0]  # type: ignore[no-any-return]


def _targets(labels: Any) -> int:
    return int((labels != -100).sum())


NUM_TARGETS: dict[str, Callable[[Mapping[str, Any], int], int]] = {
    "shift_labels": lambda inputs, _: _targets(inputs["shift_labels"]),
    "labels": lambda inputs, _: _targets(inputs["labels"]),
    "labels[..., 1:]": lambda inputs, _: _targets(inputs["labels"][..., 1:]),
    "labels but 255": lambda inputs, _: int(((inputs["labels"] != 255) & (inputs["labels"] != -100)).sum()),
    "samples": lambda _, num_samples: num_samples,
}
"""Ways to count the targets of a micro-batch."""


def _divisor(inputs: Mapping[str, Any]) -> torch.Tensor:
    """Return the number by which a loss divides that is to be a sum."""
    device = next((value.device for value in inputs.values() if isinstance(value, torch.Tensor)), None)
    return torch.ones((), device=device)
