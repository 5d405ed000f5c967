"""Samples that a dataset cannot give, for which it returns None: an error, or left out."""

from collections.abc import Sequence
from typing import Any

from lanewise.config import MissingName
from lanewise.errors import DataError


def present(
    samples: Sequence[Any], numbers: Sequence[int], missing: MissingName, eval_dataset: str
) -> tuple[Sequence[Any], tuple[int, ...]]:
    """Return the samples that are not None, and the places among the numbers of those that are.

    Args:
        samples: what the dataset gave for the numbers.
        numbers: indices; of a stream the numbers of the samples in the epoch, of the lane or of all lanes.
        missing: what is done with those that are None.
        eval_dataset: the dataset's name if it is evaluated.

    Raises:
        DataError: if one is None, and `missing` is not `skip`.
    """
    places = tuple(place for place, sample in enumerate(samples) if sample is None)
    if not places:
        return samples, ()
    if missing != "skip":
        raise DataError(
            f"{name_sample(numbers[places[0]], eval_dataset)} is None. Let the dataset return a sample (does "
            "its __getitem__ lack a return?), or leave out those that it cannot give: data.missing=skip, or "
            'missing="skip" in lanes.steps and lanes.evaluate.'
        )
    return [sample for sample in samples if sample is not None], places


def name_sample(number: int, eval_dataset: str) -> str:
    """Name a sample, for an error or the log."""
    return f"sample {number} of " + (
        f"the eval dataset {eval_dataset}" if eval_dataset else "the training data"
    )
