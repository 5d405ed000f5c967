"""The default way to make a micro-batch of samples."""

from collections.abc import Mapping
from typing import Any

from torch.utils.data import default_collate


def collate(samples: Any) -> Any:
    """Make a micro-batch of samples, as torch's `default_collate` does.

    Samples that have columns already, as the `Rows` of a table do, become a dict of these.
    """
    columns = getattr(samples, "columns", None)
    return dict(columns) if isinstance(columns, Mapping) else default_collate(samples)
