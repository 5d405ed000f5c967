"""Feeds the lanes of one process from a stream, whose lanes end at different times."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import Any, final
from weakref import proxy

from lanewise.data.lane_reader import LaneBatch, ToSource
from lanewise.data.loader import StepEnd
from lanewise.data.stream import LaneStart, StreamReader
from lanewise.data.stream_lanes import StreamLanes
from lanewise.data.stream_pass import read_first
from lanewise.errors import CheckpointError, DataError
from lanewise.lanes import PROGRESS, LaneTurn
from lanewise.processes.device.nested import copied

logger = logging.getLogger(__name__)


@final
@dataclass(eq=False)
class StreamLoader:
    """The micro-batches that a process works through, in order, over all epochs of a stream; a `LaneSource`.

    Each lane is read one micro-batch ahead, so that the last batch of a step can tell how many samples each
    lane of the process has in the next one (`LaneBatch.to_source`). Sent with the step's message, it is what
    all processes know of the next step. An epoch ends with its last lane.
    """

    reader: StreamReader
    """Reads the micro-batches of lanes."""
    exchange: Callable[[Any], Sequence[Any]]
    """Returns what all processes give it, in the order of ranks. Collective."""
    num_epochs: int | None = None
    """The number of epochs after which the run is over; None: never."""
    _: KW_ONLY
    most_lanes: int = 0
    """The most lanes that any process carries."""
    first_sample: str = ""
    """A digest of the first sample, for the identity."""
    num_workers: int = 0
    pin_memory: bool = False
    drop_last: bool = False
    """Whether an epoch ends where some lane has no whole micro-batch."""
    fills_empty: bool = False
    """Whether a micro-batch without samples gets data, for a forward that does not count."""

    schedule = None
    """Nobody knows how long the stream is."""

    def __post_init__(self) -> None:
        self.lanes = self.reader.lanes
        self.identity = {
            "stream": "lane-aware" if self.reader.is_lane_aware else "plain",
            "first_sample": self.first_sample,
            "window_steps": self.reader.cut.window_steps,
            "drop_last": self.drop_last,
        }
        self._spare: Any = None
        self._epoch = self._first_step = self._step = self._num_samples = 0  # of the next step
        self._upcoming: Sequence[int] | None = None
        """Samples of each lane in the next step; None where it begins an epoch."""
        self._taken: tuple[int, Sequence[int]] = 0, ()
        """The number in the epoch of the step whose batches were read last, and the samples of each lane."""
        self._resumed: LaneStart | None = None
        """Where to go on, until the lanes are open."""
        self._opened = StreamLanes(self.reader, self.num_workers, pin_memory=self.pin_memory)

    @property
    def state(self) -> "StreamLoader":
        """Itself: it has a state_dict."""
        return self

    @property
    def is_over(self) -> bool:
        """Whether all epochs of the run are over."""
        return self._epoch == self.num_epochs

    def plan(self) -> tuple[dict[str, Any], Mapping[str, Any]]:
        """Of a stream it is only how it is cut."""
        stream = {"stream": self.identity["stream"]}
        return {**stream, **self.reader.cut._asdict(), "drop_last": self.drop_last}, {}

    def repeat(self) -> None:
        self.num_epochs = None

    def batches(self, first_step: int, last_step: int | None) -> Iterator[LaneBatch]:
        """Yield the batches of a step after the other. Collective at the begin of an epoch.

        Raises:
            DataError: if it cannot begin with that step, or an epoch has no step.
        """
        if first_step != self._step:
            raise DataError(
                f"the stream continues with step {self._step + 1}, and step {first_step + 1} was asked for: "
                "a stream leaves out no steps. Give the step of the checkpoint that was restored, or 0."
            )
        while last_step is None or self._step < last_step:
            if self._upcoming is None or self._resumed is not None:
                self._begin()
            assert self._upcoming is not None
            lanes = self._opened
            self._taken = self._step - self._first_step, self._upcoming
            present = tuple(lane for lane, number in enumerate(self._upcoming) if number)
            own = [lane for lane in self.lanes if self._upcoming[lane]]
            if not own:
                turn = LaneTurn(self._epoch, self._step, self.lanes.start, range(0), present, is_last=True)
                data = self._spare_data() if self.fills_empty else None
                self._enter()
                yield LaneBatch(turn, (), data, 0, to_source=self._to_source([0] * len(self.lanes)))
            for lane in own:
                batch, is_last = lanes.take(lane), lane == own[-1]
                turn = batch.turn._replace(step=self._step, present=present, is_last=is_last)
                to_source = self._to_source(list(map(lanes.num_next, self.lanes))) if is_last else None
                data = batch.data
                if self.fills_empty and data is None:
                    data = self._spare_data()
                elif self.fills_empty and self._spare is None:
                    self._spare = copied(data)  # before a forward changes it
                self._enter()
                yield replace(batch, turn=turn, data=data, to_source=to_source)

    def _enter(self) -> None:
        """Set the progress back from what was read ahead."""
        if self.reader.length is not None:
            PROGRESS.set((self._step, self._epoch, self.reader.length))

    def _to_source(self, upcoming: Sequence[int]) -> ToSource:
        """Send how many samples each lane of this process has in the next step."""
        numbers = [*upcoming, *[-1] * (self.most_lanes - len(upcoming))]  # as many as other processes send
        # Weakly: a loader in a cycle with its batch is collected late, in five seconds for each worker.
        return ToSource(numbers, partial(StreamLoader.end_step, proxy(self), self._step))

    def end_step(self, step: int, numbers: Sequence[float]) -> None:
        """Go on to the next step, by what all processes sent."""
        if step < self._step:  # another pass over its lanes
            return
        assert self._upcoming is not None
        self._step += 1
        self._num_samples += sum(self._upcoming)
        self._upcoming = upcoming_of(numbers)
        if self._ends_epoch(self._upcoming):
            self._epoch, self._first_step, self._upcoming = self._epoch + 1, self._step, None

    def _ends_epoch(self, upcoming: Sequence[int]) -> bool:
        """Tell whether an epoch ends before a step in which the lanes have so many samples."""
        return min(upcoming) < self.reader.cut.micro_batch_size if self.drop_last else not any(upcoming)

    def samples_of(self, step: int, lane: int) -> Sequence[int]:
        cut, (place, num_samples) = self.reader.cut, self._taken
        if not self.reader.is_lane_aware and cut.window_steps == 1:
            place = place * cut.num_lanes + lane
        first = place * cut.micro_batch_size
        return range(first, first + num_samples[lane])

    def end_of(self, step: int) -> StepEnd:
        is_border = self._upcoming is None
        return StepEnd(self._epoch - is_border, is_border)

    def num_samples_after(self, step: int) -> int:
        return self._num_samples

    def state_dict(self) -> dict[str, Any]:
        """Return where the next step begins. Collective: every rank must call this.

        No sample is saved. The states of the stream are those at the begin of each lane's window.
        """
        states: dict[str, Any] = {}
        if self._resumed is not None:
            states = {str(lane): state for lane, state in self._resumed.states.items()}
        elif self._upcoming is not None:
            of_ranks = self.exchange({str(lane): state for lane, state in self._opened.states().items()})
            states = {lane: state for of_rank in of_ranks for lane, state in of_rank.items()}
            if not self.reader.is_lane_aware:  # all are of the one stream
                states = dict(list(states.items())[:1])
        return {
            "cut": list(self.reader.cut),
            "epoch": self._epoch,
            "first_step": self._first_step,
            "num_steps": self._step - self._first_step,
            "num_samples": self._num_samples,
            "upcoming": None if self._upcoming is None else list(self._upcoming),
            "states": states,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was called, on any number of processes, whatever was read before.

        Raises:
            CheckpointError: if the lanes were cut in another way, or the run ends before.
            ValueError: if this is no such state.
        """
        if state["cut"] != list(self.reader.cut):
            before, now = (
                "{} lanes, micro-batches of {} and windows of {} of them".format(*cut)
                for cut in (state["cut"], self.reader.cut)
            )
            raise CheckpointError(
                f"the stream of the checkpoint was cut into {before}, and this one is into {now}: a stream "
                "continues only with the same. Use the checkpoint's sizes of batch and data.shuffle_buffer."
            )
        num_epochs = int(state["epoch"]) + (state["upcoming"] is not None)  # begun ones
        if self.num_epochs is not None and num_epochs > self.num_epochs:
            raise CheckpointError(
                f"the checkpoint is in epoch {num_epochs} of the stream, and this run has "
                f"{self.num_epochs}. Raise train.epochs, or use another train.run_dir."
            )
        self.reader.close()
        self._opened = StreamLanes(self.reader, self.num_workers, pin_memory=self.pin_memory)
        self._epoch, self._first_step = int(state["epoch"]), int(state["first_step"])
        self._num_samples = int(state["num_samples"])
        self._step = self._first_step + int(state["num_steps"])
        self._upcoming, self._resumed = state["upcoming"], None
        self.reader.go_on(None)
        if self._upcoming is None:
            return
        if len(self._upcoming) != self.reader.cut.num_lanes:
            raise ValueError(
                f"it tells of {len(self._upcoming)} lanes instead of {self.reader.cut.num_lanes}"
            )
        states = {int(lane): of_lane for lane, of_lane in state["states"].items()}
        self._resumed = LaneStart(self._epoch, int(state["num_steps"]), states)
        self.reader.go_on(self._resumed)

    def _begin(self) -> None:
        """Open the lanes, and find out which of them have samples. Collective."""
        resumed, self._resumed = self._resumed, None
        ended: list[int] = []
        if resumed is not None:
            assert self._upcoming is not None
            ended = [lane for lane in self.lanes if not self._upcoming[lane]]
            self._tell_skipped(resumed)
        self._opened.open(self._epoch, ended, self._first_step)
        of_ranks = self.exchange(list(map(self._opened.num_next, self.lanes)))
        found = [number for of_rank in of_ranks for number in of_rank]
        if resumed is not None and found != self._upcoming:
            raise DataError(
                f"the stream yields other samples than before: its lanes have {found} of them in step "
                f"{self._step + 1}, and had {self._upcoming} when the checkpoint was saved. It must "
                "yield the same samples whenever an epoch is opened. Mend the stream, or begin a new run."
            )
        if self._ends_epoch(found):
            what = " and drop_last is set" if self.drop_last else ". Check its path"
            raise DataError(
                f"the stream is too small for one step in epoch {self._epoch + 1}: the lanes have "
                f"{found} samples{what}."
            )
        self._upcoming = found

    def _tell_skipped(self, resumed: LaneStart) -> None:
        """Log what has to be read again. The process of lane 0 does it for all."""
        window = self.reader.cut.window_steps
        num_steps = resumed.num_steps // window * window
        if self.lanes.start == 0 and num_steps and not resumed.states:
            num_samples = num_steps * self.reader.cut.micro_batch_size
            logger.info(
                "the stream has no state_dict and load_state_dict: up to %s samples of each lane are read "
                "again, and left out",
                f"{num_samples:,}",
            )

    def _spare_data(self) -> Any:
        """Return data for a forward that does not count: of its own first batch, or of another lane."""
        if self._spare is None:
            self._spare = read_first(self.reader).data
        return copied(self._spare)


def upcoming_of(numbers: Sequence[float]) -> list[int]:
    """Return of what processes sent how many samples each lane has in the next step, 0 where it has ended."""
    return [int(number) for number in numbers if number >= 0]
