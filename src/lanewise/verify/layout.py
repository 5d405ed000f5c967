"""One layout of the lanes over processes, and what its processes found."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from lanewise.verify.job import Result
from lanewise.verify.probe import Probe
from lanewise.verify.trace import Difference, Trace, compare


@dataclass
class Layout:
    """A number of processes, once run."""

    name: str
    """As `2 processes`."""
    results: Sequence[Result] = ()
    """The result of each rank; empty where the processes failed."""
    failure: str = ""
    """Why the processes failed, or why the steps could not be run."""
    differences: dict[str, Difference] = field(default_factory=dict)
    """The first difference of each check, compared with the first layout."""
    resumed: "Layout | None" = None
    """The same processes, going on from the checkpoint of another layout."""

    @property
    def trace(self) -> Trace | None:
        """What rank 0 saw of the steps."""
        return self.results[0].trace if self.results else None

    def compare_with(self, reference: "Layout") -> None:
        """Note the differences."""
        if reference.trace is not None and self.trace is not None:
            self.differences = compare(reference.trace, self.trace)

    def probes(self) -> Iterator[tuple[str, Probe]]:
        """Yield what the probes of every rank found, and how to call the process in a sentence."""
        alone = "a second run of 1 process" if self.name == "1 again" else self.name
        for rank, result in enumerate(self.results):
            if result.probe is not None:
                yield alone if len(self.results) == 1 else f"rank {rank} of {self.name}", result.probe
