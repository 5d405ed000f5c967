"""What the user's loss may return, checked: terms, each a sum and a weight, and what they report."""

import math
from collections import ChainMap, Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from numbers import Real
from typing import final

import torch

from lanewise.engine.step.parts import NO_PARTS, LaneParts, lane_parts
from lanewise.engine.step.wire import Term
from lanewise.errors import TaskError
from lanewise.lanes import LaneTurn
from lanewise.processes.device.accelerator import start_copy_to_host
from lanewise.runs.callback import TAKEN_NAMES
from lanewise.task import Loss

SAMPLES = "its samples"
UNITS = "the units that loss gives as weights, as tokens"
TERMS = "its samples, and in each term over units of its own"

_EXPECTED = 'Give metrics={"name": (sum, weight)}, with two numbers or scalar tensors for each name.'


@final
@dataclass(slots=True)
class LaneLoss:
    """A loss of one lane that can be trained on: `factor * value` is the sum over its units.

    Not frozen, like `LaneBatch`.
    """

    value: torch.Tensor | None = None
    """Scalar, in training with a gradient; None where the lane contributes nothing."""
    factor: float = 1.0
    """The weight if `value` is a mean, 1 if it is a sum. Kept apart from `value`, because the backward can
    start with it, which needs no further node in the graph."""
    weight: float = 0.0
    unit: str = SAMPLES
    """Over what the loss of a step is a mean: `SAMPLES`, where the task returned a plain mean, `UNITS` or
    `TERMS`."""
    metrics: Mapping[str, Term] = field(default_factory=dict)
    """What it reports besides."""
    parts: LaneParts | None = None
    """What it gives for the whole step; None where there is no lane that could, as of one without samples."""
    share: torch.Tensor | None = None
    """The scalar whose backward gives the lane's outputs their gradient, where the loss is of all samples.
    `value` and `weight` are then the whole loss, which the first lane tells to the others."""

    @classmethod
    def of(cls, returned: object, num_samples: int, what: str) -> "LaneLoss":
        """Make a `LaneLoss` of what the user's code returned.

        Args:
            returned: what the user's code returned; ignored where there are no samples.
            num_samples: whose loss it is.
            what: the name of the loss in an error message.

        Raises:
            TaskError: if the loss is not a scalar, its weight is negative or not finite, its metrics are not
                what `Loss` says, or in training it has no gradient.
        """
        if not num_samples:
            return cls()
        value, weight, unit = returned, float(num_samples), SAMPLES
        metrics: Mapping[str, Term] = {}
        parts = NO_PARTS
        if isinstance(returned, Loss):
            given = returned.weight
            weight = float(start_copy_to_host(given.detach())() if isinstance(given, torch.Tensor) else given)
            value, unit = returned.sum, UNITS
            if returned.metrics is not None:
                metrics = metric_terms(returned.metrics, what)
            if returned.gather is not None or returned.total is not None:
                parts = lane_parts(returned.gather, returned.total, what)
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            raise _refused(returned, value, what)
        if not 0 <= weight < math.inf:
            raise TaskError(
                f"{what} has the weight {weight}: need a finite number that is not negative. "
                "The weight counts the units that were added up."
            )
        has_gradient = value.requires_grad or not torch.is_grad_enabled()
        if not weight and not (has_gradient and value.isfinite()):
            return cls(metrics=metrics, parts=parts)
        if not has_gradient:
            raise _refused(returned, value, what)
        if value.dim():
            value = value.reshape(())
        return cls(value, weight if unit is SAMPLES else 1.0, weight, unit, metrics, parts)

    @property
    def sum(self) -> torch.Tensor | None:
        """The sum of the loss over its units."""
        return None if self.value is None else self.value * self.factor

    def root(self, turn: LaneTurn, scale: float) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the scalar with which the lane's backward begins, and the gradient that it begins with.

        Args:
            turn: the lane's turn. If its lane is the only one in the step, the gradient includes the division
                by the global weight, if that is not 0.
            scale: the factor by which all losses, and so all gradients, are multiplied.

        Returns:
            The arguments `loss` and `factor` of `Reducer.backward`; None where there is nothing to add.
        """
        if self.share is not None:  # the gradient of its outputs is scaled already
            return self.share, _scalar(1.0, self.share.dtype, self.share.device)
        if self.value is None:
            return None, None
        factor = self.factor * scale / (self.weight if self.weight and len(turn.present) == 1 else 1.0)
        return self.value, _scalar(factor, self.value.dtype, self.value.device)


def terms_of(returned: object) -> Sequence[Loss]:
    """Return the terms of a loss that is a sequence of `Loss`; empty where it is anything else."""
    is_several = isinstance(returned, list | tuple) and all(isinstance(term, Loss) for term in returned)
    return returned if is_several else ()  # type: ignore[return-value]  # what was checked


def check_each(returned: object, num_samples: int, what: str) -> list[LaneLoss]:
    """Check each term of what the user's code returned for some samples; one, where it is not several.

    Raises:
        TaskError: if one cannot be trained on.
    """
    if terms := terms_of(returned):
        checked = [LaneLoss.of(term, num_samples, what) for term in terms]
        names = Counter(name for loss in checked for name in _named_by(loss))
        if twice := [name for name, count in names.items() if count > 1]:
            raise TaskError(
                f"{what} reports the {twice[0]} with several of its terms. Give each its own name."
            )
        return checked
    return [LaneLoss.of(returned, num_samples, what)]


def add_terms(
    terms: Sequence[LaneLoss], weights: Sequence[float], num_of_all: int, num_samples: int
) -> LaneLoss:
    """Add the terms of a lane's loss up, each divided by its weight over all lanes.

    Args:
        terms: of the lane.
        weights: of each term, over all lanes; a term that has none is left out.
        num_of_all: samples of all lanes, by which the sum is multiplied: it is divided by them again.
        num_samples: of the lane.
    """
    metrics = {name: metric for term in terms for name, metric in term.metrics.items()}
    parts = terms[0].parts
    if given := [term.parts for term in terms if (term.parts or NO_PARTS) is not NO_PARTS]:
        parts = LaneParts(*(dict(ChainMap(*kinds)) for kinds in zip(*given, strict=True)))
    value: torch.Tensor | None = None
    for term, weight in zip(terms, weights, strict=False):  # no weights before the first step with samples
        if term.sum is not None and weight:  # a lane without samples repeats those of any other step
            part = term.sum * (num_of_all / weight)
            value = part if value is None else value + part
    weight = float(num_samples) if any(weights) else 0.0
    return LaneLoss(value, 1.0, weight, TERMS, metrics, parts)


def check_whole(returned: object, num_samples: int, what: str) -> LaneLoss:
    """Check a loss whose samples are all that there are; several terms are added up.

    Raises:
        TaskError: if it, or one of its terms, cannot be trained on.
    """
    if not num_samples or not terms_of(returned):
        return LaneLoss.of(returned, num_samples, what)
    checked = check_each(returned, num_samples, what)
    return add_terms(checked, [term.weight for term in checked], num_samples, num_samples)


def metric_terms(metrics: object, what: str) -> dict[str, Term]:
    """Check the metrics of a `Loss`, and return each as a term without a gradient. Waits for no device.

    Args:
        metrics: what the user's code gave.
        what: the name of the loss in an error message.

    Raises:
        TaskError: if they are no mapping of names to pairs of scalars, or a name is taken.
    """
    if not isinstance(metrics, Mapping):
        raise TaskError(f"{what} has metrics that are no mapping: got {metrics!r:.60}. {_EXPECTED}")
    terms: dict[str, Term] = {}
    for name, pair in metrics.items():
        if not isinstance(name, str) or not name:
            raise TaskError(f"{what} has a metric whose name is no text, or empty: got {name!r:.60}.")
        if name in TAKEN_NAMES:
            raise TaskError(
                f"{what} has a metric with the name {name}, which is taken: the trainer reports "
                f"{', '.join(sorted(TAKEN_NAMES))} itself. Use another name, for example my_{name}."
            )
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not all(map(_is_scalar, pair)):
            raise TaskError(
                f"{what} has a metric {name} that is no pair of scalars: got {_described(pair)}. {_EXPECTED}"
            )
        value, weight = (
            number.detach().reshape(()) if isinstance(number, torch.Tensor) else float(number)
            for number in pair
        )
        terms[name] = Term(value, weight)
    return terms


def require_weight(name: str, weight: float, place: str = "") -> None:
    """Raise TaskError if the weight of a metric is negative or not finite."""
    if not 0 <= weight < math.inf:
        raise TaskError(
            f"the metric {name} of the loss has the weight {weight}{place}: need a finite number that is not "
            "negative. The weight counts the units that were added up."
        )


def _refused(returned: object, value: object, what: str) -> TaskError:
    """Return the error for a loss that is no scalar, or has no gradient."""
    if isinstance(returned, Loss) and getattr(returned.weight, "requires_grad", False):
        return TaskError(
            f"{what} is a Loss whose weight has a gradient and whose sum has none: they are swapped. "
            "Return Loss(sum, weight)."
        )
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return TaskError(
            f"{what} has no gradient: nothing would be trained. "
            "Compute it from the model's outputs, without detach(), item() or torch.no_grad()."
        )
    if terms_of(returned):
        return TaskError(
            f"{what} returned several losses. Each is divided by its own weight over the global "
            "batch: give the task loss_weights(batch), which returns these, or None where only the "
            "loss knows them; a loop of your own has step.batch_loss (docs/losses.md)."
        )
    if isinstance(value, torch.Tensor):
        of_sum = "a Loss whose sum is " if isinstance(returned, Loss) else ""
        got = f"{of_sum}a tensor of shape {tuple(value.shape)}"
    elif isinstance(returned, Loss):
        got = f"a Loss whose sum is a {type(value).__name__}, not a tensor"
    else:
        got = f"{returned!r:.60}"
    return TaskError(
        f"{what} must be a scalar tensor or a Loss: got {got}. "
        "Give the mean over the micro-batch, or Loss(sum, weight) with the number of its units."
    )


def _named_by(loss: LaneLoss) -> Iterator[str]:
    """Yield what a term names, each of which the terms of a loss may name once."""
    gather, total = loss.parts or NO_PARTS
    for kind, names in (("metric", loss.metrics), ("gathered", gather), ("total", total)):
        yield from (f"{kind} {name}" for name in names)


def _is_scalar(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, Real)


def _described(pair: object) -> str:
    if isinstance(pair, torch.Tensor):
        return f"a tensor of shape {tuple(pair.shape)}"
    if isinstance(pair, tuple | list):
        return f"({', '.join(map(_described, pair[:4]))})"
    return f"{pair!r:.60}"


@lru_cache(maxsize=64)
def _scalar(value: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full((), value, dtype=dtype, device=device)  # passed as a kernel's argument, without a copy
