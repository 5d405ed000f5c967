"""What processes tell each other besides the collectives, as JSON in the store at which they meet.

    starts             how often this world was started, as rank 0 counts
    over               the failure after which no further start goes on
    N/arrived/RANK     rank RANK has come to start number N
    N/restarted        some rank knows that it is started again
    N/begun            all have come; whether this start goes on with what an earlier one began
    N/beat/RANK        what the rank does, written four times a second
    N/failures         how many said that they failed
    N/failure/K        the K-th of them
    N/asked            some rank asks for evidence, as nobody makes progress
    N/evidence/RANK    what the rank answers
    N/show/T           how many processes whose terminal is T wanted to show the failure
    N/clear/M          how many processes of machine M wanted to end those that do not end by themselves
    N/seen             how many processes have read the first failure, or are done

Who takes the first number failed first. No clock could say so, as those of hosts differ.
"""

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar, final

from lanewise.processes.die_with_parent import end_session
from lanewise.processes.watch.failure import SILENCE, Failure, described
from lanewise.processes.watch.heartbeat import COMMUNICATION, DONE, START, Note
from lanewise.processes.watch.process import ENDED, is_sibling, process_table, state_of
from lanewise.processes.watch.store import StoreLostError, TimedStore
from lanewise.processes.watch.typed_json import read_typed

T = TypeVar("T")

_UNREACHABLE = "which fell silent, with its host or the way to it"
STORE_LOST = StoreLostError.__name__
"""The kind of a failure where nobody can say more than that the store is lost."""

_SECONDS_FOR_OTHERS = 2.0
"""How long to wait for the word of a rank that is lost, or for the others to read that of this one."""
_SECONDS_TO_COME = 5.0
"""How long to wait for the others to read it where not all have come yet."""
_SECONDS_TO_END = 1.0
"""How long the other processes of a machine may take for it."""
_SECONDS_FOR_THE_FIRST = 0.5
"""How long a process leaves the terminal to local rank 0 where no store says who is first."""
_SECONDS_BETWEEN_QUESTIONS = 0.1


@dataclass(frozen=True, kw_only=True)
class Beat:
    """What a rank does, as it says itself."""

    number: int
    """Counts the beats: where it stands still, the rank has ended, is stopped, or cannot be reached."""
    host: str
    pid: int
    table: str
    """The `process_table` in which it has this number."""
    note: Note
    age_seconds: float
    """How long ago its last progress was."""
    limit_seconds: float | None
    """How long ago that may be; None: it may be any time."""

    @property
    def is_late(self) -> bool:
        """Whether its last progress is longer ago than it may be."""
        return self.limit_seconds is not None and self.age_seconds >= self.limit_seconds

    @property
    def last(self) -> str:
        """A sentence on what the rank said it did; a quarter of a second of work may have followed."""
        return f"Its last heartbeat is from {described(self.note)}. "

    def describe(self, rank: int) -> str:
        """Write where the rank is."""
        return f"rank {rank} on {self.host} (process {self.pid})"


@final
@dataclass(eq=False)
class Channel:
    """The channel of one process, or of a launcher. Any thread may call its methods."""

    store: TimedStore
    """Where the processes meet."""
    world_size: int
    """The number of processes."""
    rank: int | None = None
    """The rank of this process; None for a launcher."""
    is_local_rank_zero: bool = True
    """Whether this process has the duties of its machine if the store is lost."""
    keeps_store: bool = False
    """Whether this process keeps the store."""
    start: int = 1
    """The number of the start; `Meeting` finds it out."""
    has_met: bool = False
    """Whether all processes have come."""

    def come_to(self, start: int) -> None:
        """Go over to a later start."""
        self.start = start

    def end_meeting(self) -> None:
        """Note that all processes have come."""
        self.has_met = True

    def first(self) -> Failure | None:
        """Return the first failure of all ranks, if there is one."""
        return self._failure(self._key("failure/1"))

    def over(self) -> Failure | None:
        """Return the failure after which no start goes on, if there was one."""
        return self._failure("over")

    def report(self, failure: Failure, *, is_consequence: bool = False) -> Failure:
        """Tell all ranks that this one failed.

        Args:
            failure: what happened here.
            is_consequence: whether it says only that another rank is lost, whose own word comes first. Where
                there is none, the failure is that the rank fell silent.

        Returns:
            The first failure of all ranks.
        """
        try:
            if is_consequence:
                failure = self._cause() or failure
            number = self.store.add(self._key("failures"))
            self.store.set(self._key(f"failure/{number}"), failure.to_json())
            if number > 1:
                return until(self.first, _SECONDS_FOR_OTHERS) or failure
            before = self._failure(f"{self.start - 1}/failure/1")
            if failure.is_final(before):
                self.store.set("over", failure.to_json())
        except StoreLostError as lost:
            if is_consequence:
                text = f"{lost} Here that was: {failure.text}"
                return replace(failure, kind=STORE_LOST, text=text, shown=text, is_ours=True)
        return failure

    def _cause(self) -> Failure | None:
        """Return the first failure; else that of a rank which ended, or fell silent, without a word."""
        before = self.beats()

        found = until(lambda: self.ended(before), _SECONDS_FOR_OTHERS)
        if found := found or self._silence(silent(before, self.beats())):
            return found
        for rank, beat in self._all_beats().items():
            if beat.note[0] == DONE:
                taken = 0 if beat.note[1] is None else beat.note[1] + 1
                text = f"{beat.describe(rank)} left after step {taken}, while others wait for it."
                return failure_of(rank, beat, "left", text)
        return None

    def ended(self, beats: Mapping[int, Beat]) -> Failure | None:
        """Return the first failure; else that of ranks which are seen to have ended without a word.

        Args:
            beats: what `beats` returned.
        """
        gone = [rank for rank, beat in beats.items() if _state(beat) == ENDED]
        first, now = self.first(), self.beats() if gone else {}  # after the look: a rank ends after its word
        return first or self._silence({rank: now[rank] for rank in gone if rank in now})

    def _silence(self, lost: Mapping[int, Beat]) -> Failure | None:
        """Describe the end of ranks that said nothing; the first is one for which the others did not wait."""
        if not lost:
            return None
        ranks = sorted(lost, key=lambda rank: lost[rank].note[0] == COMMUNICATION)
        lines = [
            f"{lost[rank].describe(rank)}, {_state(lost[rank]) or _UNREACHABLE}, reported no error. "
            f"{lost[rank].last}"
            for rank in ranks
        ]
        lines[0] += "The kernel may have killed it for want of memory: see dmesg on its host."
        return failure_of(ranks[0], lost[ranks[0]], SILENCE, "\n".join(map(str.rstrip, lines)))

    def is_first(self, duty: str, place: int) -> bool:
        """Tell whether this process is the first of a place to take a duty at the end of the run.

        Args:
            duty: such as to show the failure.
            place: such as the number of a machine.
        """
        try:
            return self.store.add(self._key(f"{duty}/{place}")) == 1
        except StoreLostError:
            if not self.is_local_rank_zero:
                time.sleep(_SECONDS_FOR_THE_FIRST)
            return self.is_local_rank_zero

    def end_neighbours(self) -> None:
        """Wait a moment for the other processes of this machine to end, and kill those that do not.

        One that is stopped, or waits in code during which no signal is handled, would remain: torchrun waits
        for it for 30 seconds. Anybody may have written to the store, so only children of the same parent are
        believed to be ranks.
        """
        with suppress(StoreLostError):
            own = {beat.pid: beat for beat in self.beats().values() if beat.table == process_table()}
            own = {pid: beat for pid, beat in own.items() if pid != os.getpid() and is_sibling(pid)}

            def have_ended() -> bool:
                return all(_state(beat) == ENDED for beat in own.values())

            until(have_ended, _SECONDS_TO_END)
            for pid, beat in own.items():
                if beat.table and _state(beat) != ENDED:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                    end_session(pid)
            until(have_ended, _SECONDS_TO_END)

    def linger(self, seconds: float = _SECONDS_FOR_OTHERS) -> None:
        """Before a process ends that keeps the store, wait for the others to read the failure, or be done."""
        with suppress(StoreLostError):
            self.store.add(self._key("seen"))
            if self.keeps_store:
                # Those that have not come yet would look for the store for as long as they may.
                seconds = seconds if self.has_met else _SECONDS_TO_COME
                until(lambda: self.store.add(self._key("seen"), 0) >= self.world_size, seconds)

    def beat(self, beat: Beat) -> None:
        """Tell all ranks what this one does."""
        self.store.set(self._key(f"beat/{self.rank}"), json.dumps(asdict(beat)))

    def beats(self) -> dict[int, Beat]:
        """Return what each rank said last; those that said nothing, or that they are done, are left out."""
        return {rank: beat for rank, beat in self._all_beats().items() if beat.note[0] != DONE}

    def absent(self) -> list[int]:
        """Return the ranks that have not come yet."""
        return [rank for rank in range(self.world_size) if not self.store.has(self._key(f"arrived/{rank}"))]

    def _all_beats(self) -> dict[int, Beat]:
        found = {}
        for rank in range(self.world_size):
            if self.store.has(key := self._key(f"beat/{rank}")):
                with suppress(ValueError):  # something else wrote it
                    found[rank] = read_typed(self.store.get(key), Beat)
        return found

    def ask(self) -> bool:
        """Ask every rank for evidence; return whether this rank is the first to ask."""
        return self.store.add(self._key("asked")) == 1

    def is_asked(self) -> bool:
        """Tell whether some rank asks for evidence."""
        return self.store.has(self._key("asked"))

    def answer(self, evidence: Mapping[str, Any]) -> None:
        """Give evidence, a tree of JSON."""
        self.store.set(self._key(f"evidence/{self.rank}"), json.dumps(evidence))

    def evidence(self, ranks: Iterable[int]) -> dict[int, Any]:
        """Wait a moment for the evidence of some ranks, and return what there is."""
        keys = {rank: self._key(f"evidence/{rank}") for rank in ranks}
        until(lambda: self.store.has(*keys.values()), _SECONDS_FOR_OTHERS)
        return {rank: json.loads(self.store.get(key)) for rank, key in keys.items() if self.store.has(key)}

    def _failure(self, key: str) -> Failure | None:
        failure: Failure | None = None
        if self.store.has(key):
            with suppress(ValueError):  # something else wrote it
                failure = read_typed(self.store.get(key), Failure)
        return failure

    def _key(self, name: str) -> str:
        return f"{self.start}/{name}"


def until(function: Callable[[], T], seconds: float) -> T:
    """Call a function until it returns something true or time is up; return its last value."""
    deadline = time.monotonic() + seconds
    while not (value := function()) and time.monotonic() < deadline:
        time.sleep(_SECONDS_BETWEEN_QUESTIONS)
    return value


def _state(beat: Beat) -> str:
    return state_of(beat.pid, beat.table)


def silent(before: Mapping[int, Beat], now: Mapping[int, Beat]) -> dict[int, Beat]:
    """Return the ranks that said nothing between two calls of `beats`, with what they said last."""
    return {rank: beat for rank, beat in now.items() if rank in before and before[rank].number == beat.number}


def failure_of(rank: int, beat: Beat | None, kind: str, text: str, exit_code: int = 1) -> Failure:
    """Describe the failure of a rank that does not say it itself.

    Args:
        rank: which one.
        beat: what it said last; None if it said nothing.
        kind: see `Failure`.
        text: what happened.
        exit_code: of the rank.
    """
    note: Note = (START, None, None) if beat is None else beat.note
    host = socket.gethostname() if beat is None else beat.host
    return Failure(
        rank=rank, host=host, note=note, kind=kind, text=text, shown=text, is_ours=True, exit_code=exit_code
    )


def named_ranks(ranks: Sequence[int]) -> str:
    """Write "rank 1" or "ranks 0, 2, 3"."""
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))}"
