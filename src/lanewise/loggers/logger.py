"""What a logger is."""

from collections.abc import Mapping
from typing import Protocol


class Logger(Protocol):
    """Receives the metrics of every step on rank 0; a context manager that ends with the run."""

    def log(self, epoch: int, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of a step. Names are `group/name` with the unit: `perf/samples_per_second`."""
        ...

    def log_evaluation(self, epoch: int, step: int, values: Mapping[str, float]) -> None:
        """Take what an evaluation after this step gave, by `set/metric`."""
        ...

    def close(self) -> None:
        """Flush and let go, after the last step or after an error."""
        ...
