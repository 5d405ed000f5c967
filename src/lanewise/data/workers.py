"""Loader processes: how they are asked for the micro-batches of lanes, and how they end."""

import gc
import logging
import multiprocessing
import os
import re
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, zip_longest
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, TypeVar, final

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from lanewise.data.handles import open_handles, require_own_handles
from lanewise.data.lane_reader import LaneBatch, LaneReader
from lanewise.data.missing import name_sample
from lanewise.data.stream import StreamReader
from lanewise.errors import DataError, text_of
from lanewise.lanes import PROGRESS, RunLength, lane_ranges
from lanewise.processes.device.nested import tensors_in
from lanewise.processes.die_with_parent import die_with_parent, name_child

logger = logging.getLogger(__name__)

T = TypeVar("T")
_SECONDS_TO_SEE_AN_END = 0.5
_SECONDS_TO_BE_TOLD = 5.0


def worker_shares(lanes: range, num_workers: int) -> Sequence[range]:
    """Return the lanes that each worker owns: contiguous ones, as lanes that lie apart share more blocks.

    There are no more workers than lanes; where there are none, this process owns all lanes.
    """
    shares = lane_ranges(len(lanes), max(1, min(num_workers, len(lanes))))
    return [lanes[share.start : share.stop] for share in shares]


def deal(of_workers: Iterable[Iterable[T]]) -> Iterator[T | None]:
    """Ask one worker after the other for the next of its own, as a DataLoader does.

    A worker that has nothing left, while another has, is asked for nothing: None.

    Args:
        of_workers: for each worker what to ask it for; consumed as far as is read ahead.
    """
    return chain.from_iterable(zip_longest(*of_workers))


def read_turns(
    reader: LaneReader | StreamReader, requests: Iterable[Any], num_workers: int, *, pin_memory: bool = False
) -> Iterator[LaneBatch]:
    """Read what is asked for, in this order; nothing for None. A warning names the first missing sample.

    Args:
        reader: reads and collates the samples of a lane.
        requests: what the reader takes, as a turn with its sample indices; consumed as far as is read ahead.
            A worker gets every `num_workers`-th of them.
        num_workers: processes that read ahead; 0 reads in this one. The batches are the same.
        pin_memory: whether batches lie in page-locked memory, for a GPU.
    """
    batches = _read(reader, requests, num_workers, pin_memory=pin_memory)
    return _naming_missing(batches, reader) if reader.missing == "skip" else batches


def _read(
    reader: LaneReader | StreamReader, requests: Iterable[Any], num_workers: int, *, pin_memory: bool
) -> Iterator[LaneBatch]:
    if not num_workers and not pin_memory:
        return map(reader.__getitem__, requests)  # a DataLoader adds 8 to 11 us to each
    collects = gc.isenabled()
    is_forked = num_workers > 0 and multiprocessing.get_start_method() == "fork"
    inherited = [handle for _, handle in open_handles(reader.dataset)] if is_forked else []
    loader: DataLoader[Any] = DataLoader(
        _OrNothing(reader, PROGRESS.get(), inherited),
        batch_size=None,  # a turn is a batch already
        sampler=requests,
        num_workers=num_workers,
        worker_init_fn=partial(_init_worker, collects),
        pin_memory=pin_memory,
        # Otherwise the loader would draw its workers' seeds from the default generator.
        generator=torch.Generator(),
    )
    # The workers that are forked here begin with the signals blocked, for `_take_signals`.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    gc.disable()  # and without collections: one could wait for ever for a lock that a thread had at the fork
    try:
        if num_workers:
            multiprocessing.Lock()  # as their queues have; else torch's iterator fails when it is half made
        batches = iter(loader)
    except OSError as error:
        raise _no_workers(text_of(error)) from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if collects:
            gc.enable()
    if not num_workers:
        return batches
    ends = [process.sentinel for process in multiprocessing.active_children()]
    return _until_told(batches, reader.length, ends)


@final
@dataclass
class _OrNothing(Dataset[LaneBatch | None]):
    """Reads nothing where it is asked for nothing."""

    reader: LaneReader | StreamReader
    progress: Any
    """Where the run is when an evaluation begins."""
    inherited: list[object]
    """What the dataset had open when a worker was forked, until it has read in it."""

    def __getitem__(self, request: Any) -> LaneBatch | None:
        """Read what is asked for."""
        PROGRESS.set(self.progress)
        batch = None if request is None else self.reader[request]
        if batch is not None and get_worker_info() is not None:
            for tensor in tensors_in(batch.data):
                if tensor.layout == torch.strided:
                    tensor.share_memory_()  # or a thread would, whose error nobody gets
        if self.inherited and batch is not None:
            require_own_handles(self.reader.dataset, self.inherited)
            self.inherited = []
        return batch


def _naming_missing(batches: Iterator[LaneBatch], reader: LaneReader | StreamReader) -> Iterator[LaneBatch]:
    for batch in batches:
        if batch.missing and not reader.warned:
            number = batch.indices[batch.missing[0]]
            reader.warned.append(number)
            what = name_sample(number, reader.eval_dataset)
            logger.warning("left out: %s is None (data.missing is skip). No more are named.", what)
        yield batch


def _until_told(
    batches: Iterator[LaneBatch | None], length: RunLength | None, ends: Sequence[int]
) -> Iterator[LaneBatch]:
    """Let torch say first that a worker has ended, where that is what broke a connection to it.

    Torch says so, from the handler of the signal that the kernel sends, a moment after the connection breaks.

    Args:
        batches: what the workers read.
        length: where to note that a batch asked for the length of the run.
        ends: what becomes readable when a worker ends.
    """
    try:
        for batch in batches:
            if batch is not None:
                if length is not None:
                    if batch.asks_length:
                        length.ask()
                    PROGRESS.set((batch.turn.step, batch.turn.epoch, length))
                yield batch
    except (OSError, EOFError):
        if wait(ends, _SECONDS_TO_SEE_AN_END):
            time.sleep(_SECONDS_TO_BE_TOLD)  # the error is raised from within
        raise
    except Exception as error:
        # Else the workers live until the loader is collected, which then waits five seconds for each of them.
        traceback.clear_frames(error.__traceback__)
        del batches
        texts = "\n".join(text_of(one) for one in (error, error.__cause__) if isinstance(one, RuntimeError))
        if said := re.search(_NO_ROOM, texts):
            raise _no_workers(said[0]) from error
        raise


_NO_ROOM = r".*</torch_\d.*No space left.*|.*out of shared memory.*"
"""Matches the line in which torch says that /dev/shm is full, and why a worker may have met a bus error."""


def _no_workers(said: str) -> DataError:
    """Return the error of workers that cannot share what they read, with how much room there is for it."""
    folder = Path("/dev/shm")  # noqa: S108
    usage = shutil.disk_usage(folder) if folder.exists() else None
    room = usage and f", where {usage.free / 2**20:,.2f} of {usage.total / 2**20:,.2f} MiB are free"
    return DataError(
        f"loader workers cannot be used: {said}. They share what they read in {folder}{room or ''}. Let it "
        "be written and make it larger (docker run --shm-size 1g), or set data.num_workers 0 (num_workers "
        "of lanes.steps)."
    )


_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)


def _init_worker(collects: bool, worker: int) -> None:
    """Make a worker end with the trainer, and not before it.

    Without this it would outlive a killed trainer by up to 5 s, torch's polling interval. If a signal reaches
    every process, the trainer alone saves and stops. It collects no garbage of the trainer's, among which may
    be a loader: its end would wait for locks and workers that are the trainer's.
    """
    gc.freeze()
    if collects:
        gc.enable()
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
