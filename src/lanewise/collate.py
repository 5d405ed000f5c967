"""The default way to make a micro-batch of samples."""

from collections.abc import Mapping
from typing import Any

from torch.utils.data import default_collate

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
        raise TaskError(
            f"samples cannot be stacked to a micro-batch: {error}. Give the task, or lanes.steps, a collate "
            "that can, for example by padding them."
        ) from error


_REFUSALS = ("equal size", "default_collate: ")
"""In what torch says of samples that differ in size, or are of a type that it does not know."""
