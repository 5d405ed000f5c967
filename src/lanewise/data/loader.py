"""Feeds the lanes of one process from a dataset with an index, through one torch DataLoader iterator."""

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import groupby, tee, zip_longest
from typing import Any, TypeAlias, final

import torch
from torch.utils.data import DataLoader, Dataset

from lanewise.data.reader import LaneBatch, LaneReader
from lanewise.data.source import StepEnd
from lanewise.die_with_parent import die_with_parent, name_child
from lanewise.errors import DataError, text_of
from lanewise.lanes import LaneTurn, SampleOrder, Schedule, lane_ranges

_Request: TypeAlias = tuple[LaneTurn, tuple[int, ...]]
"""A turn with its sample indices."""
_GAP: _Request = LaneTurn(0, -1, 0, range(0), range(0), is_last=False), ()
"""Asks a worker for nothing."""
_SECONDS_TO_BE_TOLD = 0.5


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
    num_workers: int = 0
    """Processes that read ahead; 0 reads in this one. The batches are the same."""
    pin_memory: bool = False
    """Whether batches lie in page-locked memory, for a GPU."""
    fills_empty: bool = False
    """Whether a turn without samples gets the data of lane 0, for a forward that does not count."""

    is_over = False
    """See `LaneSource`: the number of steps is known."""
    state = None
    """See `LaneSource`."""

    @property
    def schedule(self) -> Schedule:
        """How an epoch is cut into steps, and a step into lanes."""
        return self.order.schedule

    def note(self, upcoming: Sequence[int]) -> None:
        """See `LaneSource`: no step's totals tell it."""

    def ends_run(self, upcoming: Sequence[int]) -> bool:
        """See `LaneSource`: no step's totals tell it."""
        return False

    def end_of(self, step: int) -> StepEnd:
        """See `LaneSource`."""
        done, per_epoch = step + 1, self.schedule.steps_per_epoch
        return StepEnd(step // per_epoch, done % per_epoch == 0, self.schedule.num_samples_before(done))

    def batches(self, first_step: int, last_step: int | None) -> Iterator[LaneBatch]:
        """See `LaneSource`."""
        turns = self.schedule.turns(self.lanes, first_step, last_step)
        if not self.order.reads_blocks or self.num_workers < 2:
            requests = ((turn, self._indices(turn)) for turn in turns)
            return read_turns(self.reader, requests, self.num_workers, pin_memory=self.pin_memory)
        turns, again = tee(turns)
        lanes_of_workers = lane_ranges(len(self.lanes), min(self.num_workers, len(self.lanes)))
        dealt = self._deal(turns, lanes_of_workers)
        batches = read_turns(self.reader, dealt, len(lanes_of_workers), pin_memory=self.pin_memory)
        return _in_order(again, batches)

    def _deal(self, turns: Iterable[LaneTurn], lanes_of_workers: Sequence[range]) -> Iterator[_Request]:
        """Ask each worker for the turns of its own lanes, which are contiguous.

        A DataLoader asks its workers in rounds; a worker without a turn in a round is asked for nothing. If
        its lanes lay apart, each worker would read nearly every block that two lanes share.
        """
        for _, of_step in groupby(turns, lambda turn: turn.step):
            waiting = list(of_step)
            of_workers = (
                [turn for turn in waiting if turn.lane - self.lanes.start in lanes]
                for lanes in lanes_of_workers
            )
            for in_round in zip_longest(*of_workers):
                for turn in in_round:
                    yield _GAP if turn is None else (turn, self._indices(turn))

    def _indices(self, turn: LaneTurn) -> tuple[int, ...]:
        if self.fills_empty and not turn.positions:
            turn = turn._replace(lane=0, positions=self.schedule.positions(turn.step, 0))
        return self.order.samples(turn)


def _in_order(turns: Iterable[LaneTurn], batches: Iterator[LaneBatch]) -> Iterator[LaneBatch]:
    """Yield the batches in the order of their turns; those of a step come in rounds of the workers."""
    early: dict[tuple[int, int], LaneBatch] = {}
    for turn in turns:
        while (turn.step, turn.lane) not in early:
            batch = next(batches)
            early[batch.turn.step, batch.turn.lane] = batch
        yield early.pop((turn.step, turn.lane))


def read_turns(
    reader: Dataset[LaneBatch], turns: Iterable[Any], num_workers: int, *, pin_memory: bool = False
) -> Iterator[LaneBatch]:
    """Read turns in order.

    Args:
        reader: reads and collates the samples of a turn.
        turns: what the reader takes for each, as a turn with its sample indices; consumed as far as is read
            ahead.
        num_workers: processes that read ahead; 0 reads in this one. The batches are the same.
        pin_memory: whether batches lie in page-locked memory, for a GPU.
    """
    if not num_workers and not pin_memory:
        return map(reader.__getitem__, turns)  # a DataLoader adds 8 to 11 us to each
    loader: DataLoader[LaneBatch] = DataLoader(
        reader,
        batch_size=None,  # a turn is a batch already
        sampler=turns,
        num_workers=num_workers,
        worker_init_fn=_init_worker,
        pin_memory=pin_memory,
        # Otherwise the loader would draw its workers' seeds from the default generator.
        generator=torch.Generator(),
    )
    if num_workers:
        try:
            multiprocessing.Lock()  # as the queues of the workers have
        except OSError as error:
            raise DataError(
                f"data.num_workers {num_workers} cannot be started: {text_of(error)}. Let /dev/shm be "
                "written, or use data.num_workers 0."
            ) from error
    # The workers that are forked here begin with the signals blocked, for `_take_signals`.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        batches = iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return _until_told(batches) if num_workers else batches


def _until_told(batches: Iterator[LaneBatch]) -> Iterator[LaneBatch]:
    """Let torch say first that a worker has ended, where that is what broke a connection to it.

    Torch says so, from the handler of the signal that the kernel sends, a moment after the connection breaks.
    """
    try:
        yield from batches
    except (OSError, EOFError):
        time.sleep(_SECONDS_TO_BE_TOLD)
        raise


_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)


def _init_worker(worker: int) -> None:
    """Make a worker end with the trainer, and not before it.

    Without this it would outlive a killed trainer by up to 5 s, torch's polling interval. If a signal reaches
    every process, the trainer alone saves and stops.
    """
    die_with_parent()
    name_child(f"loader {worker}")
    if sys.platform == "linux":  # others don't tell who sent a signal
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        threading.Thread(target=_take_signals, name="signals", daemon=True).start()


def _take_signals() -> None:
    """Ignore the signals except the trainer's own SIGTERM: at its exit it waits for the workers to end."""
    while True:
        info = signal.sigwaitinfo(_SIGNALS)
        if info.si_signo == signal.SIGTERM and info.si_pid == os.getppid():
            os._exit(0)  # as torch's own handler does: another code would be an error in the trainer
