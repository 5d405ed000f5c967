"""Finds out over what the loss of a model of transformers is a mean."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import torch

from lanewise.adapt.loss import LossObserver, rows, spread_samples
from lanewise.engine.evaluation.evaluator import eval_mode
from lanewise.errors import TaskError
from lanewise.hugging_face.task import NUM_TARGETS, TrainerParts
from lanewise.processes.device.nested import map_leaves
from lanewise.processes.device.random_state import kept_random_state

_MANY = 2**20
"""A number of items by which a sum all but vanishes, so that whatever is not divided by it shows."""
_WHAT = "the loss of the Trainer"
_REMEDY = "Write a Task, whose loss returns its sum and weight."


def find_weight(parts: TrainerParts, num_samples: int, device: torch.device) -> None:
    """Look at micro-batches, and note in the parts how the loss is weighted.

    The library gives a model `num_items_in_batch`, by which it shall divide its sum. A loss that does so is a
    sum where that is 1. One that ignores it is a mean, and its weight is what it is a mean over. Either must
    be what its samples add up to.

    Args:
        parts: of the trainer.
        num_samples: of a micro-batch.
        device: where the model is.

    Raises:
        TaskError: if it is neither, or draws random numbers without dropout.
    """
    kinds: list[str] = []
    with eval_mode(parts.model), torch.no_grad(), kept_random_state(), LossObserver(parts.model) as observer:
        for samples in spread_samples(parts.train_dataset, num_samples):
            batch = _Looked(parts, samples, device)
            value, divided = batch.loss(), batch.loss(num_items=_MANY)
            if not value or not math.isfinite(value):  # there are no targets
                continue
            if not kinds:
                if not observer.is_sum_of_parts(value, [batch.loss(seed=1)]):
                    raise TaskError(f"{_WHAT} draws random numbers in evaluation mode. {_REMEDY}")
                parts.takes_count = observer.is_sum_of_parts(value, [divided * _MANY])
                if not parts.takes_count and not observer.is_sum_of_parts(value, [divided]):
                    raise TaskError(
                        f"{_WHAT} is {value:g} for num_items_in_batch=1 and {divided:g} for {_MANY}: it must "
                        f"be a sum that is divided by it, or a mean that ignores it. {_REMEDY}"
                    )
            fitting = [] if observer.reasons else list(batch.fitting(observer.is_sum_of_parts))
            kinds = [kind for kind in kinds if kind in fitting] if kinds else fitting
            if not kinds:
                raise TaskError(
                    f"{_WHAT} of {len(samples)} samples is not what they add up to one by one, weighted by "
                    "their targets: they influence each other, or have weights of their own"
                    f"{''.join(observer.reasons[:1])}. {_REMEDY}"
                )
    if not kinds:
        raise TaskError(
            f"{_WHAT} is 0 or NaN in each micro-batch that was looked at, as without targets. Look at the "
            "labels that the data_collator makes."
        )
    parts.counts = kinds[0]


@final
class _Looked:
    """A micro-batch that is looked at."""

    def __init__(self, parts: TrainerParts, samples: list[Any], device: torch.device) -> None:
        self._parts, self._samples, self._device = parts, samples, device
        self._inputs = self._collate(samples)

    def loss(self, inputs: dict[str, Any] | None = None, num_items: int = 1, seed: int = 0) -> float:
        """Return the loss that the Trainer computes, of this micro-batch or of given inputs."""
        inputs = inputs or self._inputs
        torch.manual_seed(seed)
        divisor = torch.tensor(float(num_items), device=self._device)
        outputs = self._parts.forward(self._parts.model, inputs, divisor)
        return float(self._parts.loss(outputs, inputs, divisor))

    def fitting(self, is_sum_of_parts: Callable[[float, Sequence[float]], bool]) -> Iterator[str]:
        """Yield the ways of counting targets that may be the loss's, the likeliest one first."""
        inputs, num_samples = self._inputs, len(self._samples)
        shapes = (value.shape for value in inputs.values() if isinstance(value, torch.Tensor))
        if any(shape[:1] == (num_samples,) for shape in shapes):
            single = [rows(inputs, num_samples, row) for row in range(num_samples)]
        else:  # a collator that packs samples into one row
            single = [self._collate([sample]) for sample in self._samples]
        losses = [self.loss(batch) for batch in (inputs, *single)]
        for kind in self._kinds():
            count = NUM_TARGETS[kind]
            counts = [count(inputs, num_samples), *(count(batch, 1) for batch in single)]
            weights = [min(count, 1) for count in counts] if self._parts.takes_count else counts
            whole, *terms = (
                loss * weight if weight else 0.0 for loss, weight in zip(losses, weights, strict=True)
            )
            if is_sum_of_parts(whole, terms):
                yield kind

    def _kinds(self) -> list[str]:
        """Return the ways of counting that the labels allow.

        Neither a sum nor rows of one length show what is counted. But the labels in the first place alone
        are no targets of a model that shifts them, and so have no loss.
        """
        labels = self._inputs.get("labels")
        if "shift_labels" in self._inputs:
            return ["shift_labels"]
        if not isinstance(labels, torch.Tensor):
            return ["samples"]
        if labels.dim() > 2:
            of_pixels = ["labels but 255"] if "pixel_values" in self._inputs else []
            return [*of_pixels, "labels", "samples"]
        if labels.dim() < 2:
            return ["labels", "samples"]
        others = [] if self._parts.takes_count else ["samples"]
        first = labels.clone()
        first[..., 1:] = -100
        if bool((first == -100).all()):
            return ["labels", "labels[..., 1:]", *others]
        alone = self.loss({**self._inputs, "labels": first})
        return ["labels" if alone and math.isfinite(alone) else "labels[..., 1:]", *others]

    def _collate(self, samples: list[Any]) -> Any:
        return map_leaves(lambda leaf: leaf.to(self._device), dict(self._parts.collator(samples)))
