"""Watches this process and, with a channel, the others; and ends it when the run has failed."""

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import NoReturn, final

from lanewise.config import DistributedConfig
from lanewise.errors import LanewiseError
from lanewise.processes.die_with_parent import end_session
from lanewise.processes.watch.channel import Beat, Channel, silent
from lanewise.processes.watch.failure import LAUNCHER_SHOWS_VARIABLE, Failure, is_consequence, record_failure
from lanewise.processes.watch.heartbeat import DONE, OWN_CODE, SAVE, START, heartbeat
from lanewise.processes.watch.meeting import Meeting
from lanewise.processes.watch.process import is_debugged, process_table
from lanewise.processes.watch.stall import describe_stall, gather_evidence
from lanewise.processes.watch.store import StoreLostError

logger = logging.getLogger(__name__)

SAVING = "lanewise checkpoint"
"""The name of the threads that write checkpoints."""
_SECONDS_BETWEEN_CHECKS = 0.25
_LONGEST_CHECK_SECONDS = 4.0
"""How much time a check counts for at most: it may wait for a store which does not answer."""
_SECONDS_FOR_OTHERS = 300.0
"""How long the others may take for what they do after this process, such as to learn of the last save."""
_SECONDS_TO_END = 8.0
_CHECKS_TO_REPORT = 60
"""How many checks later another rank reports a stall, if the rank that began to has ended."""


@final
class Watch:
    """The watch of one process.

    Args:
        meeting: with the other processes; None for a process alone.
        at_end: called with the first failure, once or twice, before the process ends; removes what it must
            not leave.
    """

    def __init__(
        self, meeting: Meeting | None = None, at_end: Callable[[Failure], object] = lambda _: None
    ) -> None:
        self.meeting = meeting
        self.is_restarted = False
        """Whether an earlier start of the run failed; known after `meet`."""
        self._channel = None if meeting is None else meeting.channel
        self._rank = 0 if meeting is None else meeting.environment.rank
        self._at_end = at_end
        self._ending = threading.Lock()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._note: object = None
        self._age_seconds, self._last_check = 0.0, time.monotonic()
        self._num_pieces = self._num_beats = self._checks_since_stall = self._checks_without_store = 0
        self._halfway: dict[int, Beat] | None = None
        """What all ranks said when half of the time in which this one may make no progress had passed."""

    def begin(self, distributed: DistributedConfig) -> None:
        """Begin to look, in a thread, and allow as long without progress as the configuration says."""
        heartbeat.note, heartbeat.has_trained = (START, None, None), False  # not those of a run before
        self._limits = {
            "stall_seconds": distributed.stall_seconds,
            "start_seconds": distributed.start_seconds,
        }
        if self._channel is not None and (over := self._channel.over()):
            self._end(over)  # a further start would come to the same end
        self._check()
        self._thread = threading.Thread(target=self._check_again_and_again, name="watch", daemon=True)
        self._thread.start()

    def meet(self) -> None:
        """Wait until all processes have come. Collective: every rank must call this."""
        if self.meeting is not None:
            self.is_restarted = self.meeting.wait()

    def agree(self, choose: Callable[[], str]) -> str:
        """Return what rank 0 chose in the first start of a launch. Collective: every rank must call this."""
        return choose() if self.meeting is None else self.meeting.agree(choose)

    def close(self, leave: Callable[[], object] = lambda: None) -> None:
        """End the watch: this process has done its part, and leaves its world by `leave`.

        The others need not do so at the same time. One that keeps the store stays until they have.
        """
        _wait_for_saves()
        heartbeat.note = (DONE, heartbeat.step, None)
        leave()
        if self._channel is not None and self._channel.keeps_store:
            self._channel.linger(_SECONDS_FOR_OTHERS)  # while the thread goes on
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def fail(self, error: BaseException) -> NoReturn:
        """End this process after an error, and tell the others."""
        if threading.current_thread() is threading.main_thread():
            # Torchrun sends it to all processes of a host as soon as one has ended.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            # Torch's handler raises an error over whatever runs when a loader process has ended.
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        failure, follows = Failure.of(error, self._rank), is_consequence(error)
        if not follows:  # the others are there, so the last save can be completed
            _wait_for_saves()
        if self._channel is not None:
            failure = self._channel.report(failure, is_consequence=follows)
        self._end(failure, error)

    def show_and_end(
        self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        """Do what `fail` does; for `sys.excepthook`, in a process whose loop is the user's own."""
        if issubclass(kind, KeyboardInterrupt):
            sys.__excepthook__(kind, error, traceback)
        else:
            self.fail(error)

    def _end(self, first: Failure, error: BaseException | None = None) -> NoReturn:
        """End this process, once; the failure is shown once on each terminal."""
        if not self._ending.acquire(blocking=False):
            threading.Event().wait()  # another thread ends the process
        has_duties = not os.environ.get(LAUNCHER_SHOWS_VARIABLE)  # else the launcher has them
        code = error.exit_code if isinstance(error, LanewiseError) else first.exit_code
        # A pipe that nobody reads, or a disk that does not answer, must not keep the process.
        deadline = threading.Timer(_SECONDS_TO_END, os._exit, [code])
        deadline.daemon = True
        with suppress(RuntimeError):  # Python 3.12 starts no thread when the interpreter ends
            deadline.start()
        try:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            record_failure(first)
            self._log(first, error, shows=has_duties)
            self._at_end(first)
            end_session(os.getpid())  # if it leads one, as it does under torchrun
            if self.meeting is not None:
                self.meeting.channel.linger()
                if has_duties and self.meeting.channel.is_first("clear", self.meeting.environment.machine):
                    self.meeting.channel.end_neighbours()
                    self._at_end(first)  # of those that were killed something may be left
        finally:  # even if the logs or the console cannot be written
            # A usual exit would run destructors that wait for ranks which have ended.
            os._exit(code)

    def _log(self, first: Failure, error: BaseException | None, *, shows: bool) -> None:
        """Write the error of this process to its log; show the first failure, or a line, on the terminal."""
        is_other = first.rank != self._rank
        why = f"rank {first.rank} on {first.host} failed first." if is_other else first.summary
        line = text = f"rank {self._rank} ends: {why}"
        if self.meeting is None or (
            shows and self.meeting.channel.is_first("show", self.meeting.environment.terminal)
        ):
            text = f"error: {first}"
        if not logging.root.handlers:
            sys.stderr.write(f"{text}\n" if shows else "")
            return
        if error is not None:
            logger.error("rank %d failed", self._rank, exc_info=error, extra={"is_for_file_only": True})
        elif not is_other:
            logger.error("%s", first, extra={"is_for_file_only": True})
        if is_other:
            logger.error("%s", line, extra={"is_for_file_only": True})
        if shows:
            logger.error("%s", text, extra={"is_for_console_only": True})
        logging.shutdown()

    def _check_again_and_again(self) -> None:
        while not self._closed.wait(_SECONDS_BETWEEN_CHECKS):
            self._check()
        if self._channel is not None:
            with suppress(StoreLostError):
                self._channel.beat(self._beat())  # that it is done
                self._channel.linger()

    def _check(self) -> None:
        self._measure_age()
        beat = self._beat()
        try:
            if self._channel is not None:
                self._talk(self._channel, beat)
            if beat.is_late:
                self._examine(beat)
            self._checks_without_store = 0
        except StoreLostError as lost:
            self._checks_without_store += 1
            if lost.has_ended and beat.note[0] in (DONE, OWN_CODE):
                self._closed.set()  # who ended may have done its part; if not, the next step will show it
            elif lost.has_ended or (beat.is_late and self._checks_without_store > 1):
                self._end(Failure.of(lost, self._rank))

    @property
    def _key(self) -> str:
        """The key of the configuration that holds now."""
        return "stall_seconds" if heartbeat.has_trained else "start_seconds"

    def _measure_age(self) -> None:
        """Add up the time since the last progress, but for that in which this process was stopped."""
        note, num_pieces, now = heartbeat.note, heartbeat.num_pieces, time.monotonic()
        seconds, self._last_check = min(now - self._last_check, _LONGEST_CHECK_SECONDS), now
        is_same = note is self._note and num_pieces == self._num_pieces  # a new note may say the same again
        self._note, self._num_pieces = note, num_pieces
        self._age_seconds = self._age_seconds + seconds if is_same else 0.0
        if not is_same:
            self._halfway = None

    def _beat(self) -> Beat:
        """Return what this process does."""
        self._num_beats += 1
        beat = Beat(
            number=self._num_beats,
            host=socket.gethostname(),
            pid=os.getpid(),
            table=process_table(),
            note=heartbeat.note,
            age_seconds=self._age_seconds,
            limit_seconds=None if heartbeat.note[0] in (OWN_CODE, DONE) else self._limits[self._key],
        )
        return replace(beat, limit_seconds=None) if beat.is_late and is_debugged() else beat

    def _talk(self, channel: Channel, beat: Beat) -> None:
        """Tell what this process does, and hear what the others want; end with the first failure."""
        channel.beat(beat)
        if first := channel.first():
            self._end(first)
        # One that waits for the others outside of a collective would not hear that they have ended.
        if beat.note[0] in (SAVE, DONE) and not self._rank and (lost := channel.ended(channel.beats())):
            self._end(channel.report(lost))
        if channel.is_asked():
            channel.answer(gather_evidence(channel.beats()))
        if self._halfway is None and beat.limit_seconds and beat.age_seconds >= beat.limit_seconds / 2:
            self._halfway = channel.beats()

    def _examine(self, beat: Beat) -> None:
        """Report that the run makes no progress, if no rank does; called where this one makes none."""
        limit = f"distributed.{self._key}={beat.limit_seconds:g}"
        if self._channel is None:
            beats = {0: beat}
            self._end(describe_stall(beats, {}, {0: gather_evidence(beats)}, limit))
        assert self._halfway is not None
        beats = self._channel.beats()
        # One that keeps the interpreter to itself for a moment, and so says nothing, is not silent.
        lost = silent(self._halfway, beats)
        alive = beats.keys() - lost.keys()
        if not all(beats[rank].is_late for rank in alive):
            return
        self._checks_since_stall += 1
        if self._channel.ask() or self._checks_since_stall > _CHECKS_TO_REPORT:
            self._channel.answer(gather_evidence(beats))
            evidence = self._channel.evidence(alive)
            failure = describe_stall(beats, lost, evidence, limit, self._channel.absent())
            self._end(self._channel.report(failure))


def _wait_for_saves() -> None:
    """Wait until the checkpoints that this process takes part in are written."""
    heartbeat.note = (SAVE, heartbeat.step, None)
    for thread in threading.enumerate():
        if thread.name == SAVING:
            thread.join()
