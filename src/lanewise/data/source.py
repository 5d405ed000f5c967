"""What a loop needs of whatever gives each step its batches: an order of samples, or a stream."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from lanewise.data.reader import LaneBatch
from lanewise.lanes import Schedule

if TYPE_CHECKING:
    from lanewise.data.stream import StreamReader


class StepEnd(NamedTuple):
    """Where in the run a step was."""

    epoch: int
    ends_epoch: bool
    num_samples: int
    """Samples of all lanes in the run so far, with this step."""


class SourceReader(Protocol):
    """Reads the dataset of a source."""

    dataset: Any
    seed: int
    """Of the run."""
    eval_dataset: str
    """Name of the dataset if it is evaluated; empty in training."""
    number: tuple[int, int]
    """The dataset's number in a loop, and how often it was begun before; part of the random state."""

    @property
    def total_bytes(self) -> int | None:
        """Bytes of all samples; None where the dataset does not count them."""
        ...

    def streams(self) -> "Iterator[StreamReader]":
        """Yield a reader of single samples for each stream that the dataset is, or is a mixture of."""
        ...


class LaneSource(Protocol):
    """Gives a process the micro-batches of its lanes, step by step and over all epochs."""

    @property
    def reader(self) -> SourceReader:
        """Reads the dataset."""
        ...

    @property
    def schedule(self) -> Schedule | None:
        """How an epoch is cut into steps; None where only the data tells, as of a stream."""
        ...

    @property
    def identity(self) -> Mapping[str, Any]:
        """What tells the samples and their order from others: a checkpoint of others is of another run."""
        ...

    @property
    def is_over(self) -> bool:
        """Whether all epochs of the run are over, where only the data tells when."""
        ...

    @property
    def state(self) -> "SourceState | None":
        """What a checkpoint must hold of it; None where the number of the next step is enough."""
        ...

    def plan(self) -> tuple[dict[str, Any], Mapping[str, Any]]:
        """Return by what an audit knows the samples of each step, and the tables that this needs, by name."""
        ...

    def repeat(self) -> None:
        """Go on after the last epoch, without end."""
        ...

    def batches(self, first_step: int, last_step: int | None) -> Iterator[LaneBatch]:
        """Yield the batches of a step after the other; at least one, maybe empty, a step.

        Args:
            first_step: with which to begin.
            last_step: before which to end; None: never.
        """
        ...

    def note(self, upcoming: Sequence[int]) -> None:
        """Learn how many samples each lane has in the next step, where a step's totals tell it.

        Called after each step, on every rank.
        """
        ...

    def ends_run(self, upcoming: Sequence[int]) -> bool:
        """Tell whether the run ends before a step in which the lanes have so many samples."""
        ...

    def end_of(self, step: int) -> StepEnd:
        """Tell where a step was, of a stream only the last one that was taken. Step -1 ends an epoch."""
        ...


class SourceState(Protocol):
    """An object whose state goes into a checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state. Collective: every rank must call this."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore it."""
        ...
