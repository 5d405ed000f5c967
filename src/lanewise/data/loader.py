"""Feeds the lanes of one process from a dataset with an index, through one torch DataLoader iterator."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field
from itertools import groupby, tee
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias, final

from lanewise.data.lane_reader import LaneBatch, LaneReader
from lanewise.data.workers import deal, read_turns, worker_shares
from lanewise.lanes import LaneTurn, SampleOrder, Schedule

_Request: TypeAlias = tuple[LaneTurn, tuple[int, ...]]
"""A turn with its sample indices."""


class StepEnd(NamedTuple):
    """Where in the run a step was."""

    epoch: int
    ends_epoch: bool


@final
@dataclass(frozen=True, eq=False)
class LaneLoader:
    """The micro-batches that a process works through, in order, over all epochs; a `LaneSource`.

    Since one iterator serves the whole run, workers never start again and prefetching never pauses between
    epochs. The step number is the only position: it takes no longer to start in the middle of an epoch than
    at its beginning.
    """

    reader: LaneReader
    """Reads and collates the samples of a turn."""
    order: SampleOrder
    """Gives the samples of a turn, and cuts epochs into steps and steps into lanes."""
    lanes: range
    """The lanes to serve."""
    _: KW_ONLY
    identity: Mapping[str, Any] = field(default_factory=dict)
    """What tells the samples and their order from others: a checkpoint of others is of another run."""
    num_workers: int = 0
    """Processes that read ahead; 0 reads in this one. The batches are the same."""
    pin_memory: bool = False
    """Whether batches lie in page-locked memory, for a GPU."""

    is_over = False
    """Whether all epochs of the run are over, where only the data tells when, as of a stream."""
    state = None
    """What a checkpoint must hold of a source; None where the number of the next step is enough."""

    @property
    def schedule(self) -> Schedule:
        """How an epoch is cut into steps, and a step into lanes."""
        return self.order.schedule

    def plan(self) -> tuple[dict[str, Any], Mapping[str, Any]]:
        """Return by what an audit knows the samples of each step, and the tables that this needs, by name."""
        inputs = self.order.inputs
        order = {"order": self.identity["order"], "repeats": self.order.repeats}
        return {**asdict(inputs.schedule), **order}, inputs.used

    def repeat(self) -> None:
        """Go on after the last epoch, without end; a loader of an order does so anyway."""

    def end_of(self, step: int) -> StepEnd:
        """Tell where a step was, of a stream only the last one that was taken. Step -1 ends an epoch."""
        epoch, number = divmod(step, self.order.schedule.steps_per_epoch)
        return StepEnd(epoch, number + 1 == self.order.schedule.steps_per_epoch)

    def num_samples_after(self, step: int) -> int:
        """Count the samples of all lanes in the run so far, with this step; of a stream only the last one."""
        return self.order.schedule.num_samples_before(step + 1)

    def samples_of(self, step: int, lane: int) -> Sequence[int]:
        """Return the indices of the samples that a lane, of any process, has in a step.

        Of a stream, in the step that was just taken, their numbers in this epoch: of the lane, or of all
        lanes where the stream is plain. With a shuffle buffer they are places in the lane, after shuffling.
        """
        (turn,) = self.schedule.turns(range(lane, lane + 1), step, step + 1)
        return list(map(int, self.order.samples(turn)))

    def batches(self, first_step: int, last_step: int | None) -> Iterator[LaneBatch]:
        """Yield the batches of a step after the other; at least one, maybe empty, a step.

        Args:
            first_step: the step with which to begin.
            last_step: the step before which to end; None: never.
        """
        turns = self.schedule.turns(self.lanes, first_step, last_step)
        if not self.order.reads_blocks or self.num_workers < 2:
            requests = self._requests(turns)
            return read_turns(self.reader, requests, self.num_workers, pin_memory=self.pin_memory)
        shares = worker_shares(self.lanes, self.num_workers)
        dealt = self._deal(self.schedule.turns(self.lanes, first_step, last_step), shares)
        return _in_order(turns, read_turns(self.reader, dealt, len(shares), pin_memory=self.pin_memory))

    def _deal(self, turns: Iterable[LaneTurn], shares: Sequence[range]) -> Iterator[_Request | None]:
        """Ask each worker for the turns of its own lanes, step by step, so that none reads further ahead."""
        for _, in_step in groupby(turns, attrgetter("step")):
            of_step = list(in_step)
            yield from deal(
                [self._requests([turn for turn in of_step if turn.lane in share]) for share in shares]
            )

    def _requests(self, turns: Iterable[LaneTurn]) -> Iterator[_Request]:
        asked, own = tee(turns)
        read = map(self._filled, own) if self.reader.fills_empty else own
        return zip(asked, map(self.order.samples, read), strict=True)

    def _filled(self, turn: LaneTurn) -> LaneTurn:
        """Return whose samples a turn reads: where it has none, those of lane 0."""
        if turn.positions:
            return turn
        return turn._replace(lane=0, positions=self.schedule.positions(turn.step, 0))


def _in_order(turns: Iterable[LaneTurn], batches: Iterator[LaneBatch]) -> Iterator[LaneBatch]:
    """Yield the batches in the order of their turns; a step's come as the workers are asked for them."""
    early: dict[tuple[int, int], LaneBatch] = {}
    for turn in turns:
        while (turn.step, turn.lane) not in early:
            batch = next(batches)
            early[batch.turn.step, batch.turn.lane] = batch
        yield early.pop((turn.step, turn.lane))
