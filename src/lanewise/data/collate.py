"""Makes a micro-batch of samples, in the user's way or by default."""

from collections.abc import Callable, Mapping
from typing import Any

from torch.utils.data import Dataset, default_collate

from lanewise.errors import TaskError


def collate(samples: Any) -> Any:
    """Make a micro-batch of samples, as torch's `default_collate` does.

    Samples that have columns already, as the `Rows` of a table do, become a dict of these.

    Raises:
        TaskError: if they cannot be stacked.
    """
    columns = getattr(samples, "columns", None)
    if isinstance(columns, Mapping):
        return dict(columns)
    try:
        return default_collate(samples)
    except (RuntimeError, TypeError) as error:
        if not any(part in str(error) for part in _REFUSALS):
            raise
        remedy = "Give the task, or lanes.steps, a collate that can, for example by padding them."
        if isinstance(samples[0], Dataset):
            remedy = "They are datasets: join these by torch.utils.data.ConcatDataset instead of a list."
        raise TaskError(f"samples cannot be stacked to a micro-batch: {error}. {remedy}") from error


def no_batch(function: Callable[[Any], Any]) -> TaskError:
    """Return the error about a user's function that made None of samples."""
    name = getattr(function, "__qualname__", "collate")
    return TaskError(
        f"{name} must return a micro-batch: got None. Does it lack a return? Let the dataset return "
        "None for samples that cannot be used, with data.missing=skip: the samples of a step are counted."
    )


_REFUSALS = ("equal size", "default_collate: ")
"""Parts of what torch says of samples that differ in size, or are of a type that it does not know."""
