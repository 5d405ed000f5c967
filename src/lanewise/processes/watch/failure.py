"""What a process says of the error that ends a run, and which errors only follow from another process's."""

import json
import os
import re
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from lanewise.errors import (
    ConfigError,
    LanewiseError,
    LostRankError,
    StorageError,
    describe,
    plain_lines,
    text_of,
    traceback_of,
)
from lanewise.processes.watch.heartbeat import Note, heartbeat
from lanewise.processes.watch.store import StoreLostError
from lanewise.processes.watch.typed_json import as_type

LAUNCHER_SHOWS_VARIABLE = "LANEWISE_LAUNCHER_SHOWS"
"""Environment variable which says that the launcher shows the first failure on the terminal."""
ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
"""Environment variable of torchrun's contract: the file for `record_failure`."""
_MISTAKE = ConfigError.exit_code
_LOST = re.compile(
    r"third_party/gloo/|Connection (closed|reset) by peer|Broken pipe|rank \d+ ended while this one waited"
)
"""What gloo says, as a RuntimeError, when a process that it communicates with has ended; and what DDP makes
of a LostRankError of its hook."""


LOST_HOST = "lost host"
"""The kind of a failure where the launcher knows only that a host is lost."""
SILENCE = "silence"
"""The kind of a failure that other ranks noticed: the rank itself said nothing."""
_OF_LOST = (LOST_HOST, SILENCE, StoreLostError.__name__)
"""The kinds of failures that are no error of the run, whose step is unknown."""
_MOST_CHARACTERS = 2**16
"""How long each text of a failure may be: the store takes no message of many megabytes."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """An error that ends the run, and where it arose. It travels as JSON, so very long texts are cut."""

    rank: int
    host: str
    note: Note
    """What the process did: phase, step, lane."""
    kind: str
    """The class of the error, or the signal that ended the process."""
    text: str
    """What the error says."""
    shown: str
    """What a user is shown: for an error of ours its text, for any other its traceback."""
    is_ours: bool
    exit_code: Annotated[int, range(1, 256)]

    def __post_init__(self) -> None:
        for name in ("kind", "text", "shown"):
            object.__setattr__(self, name, _cut(plain_lines(getattr(self, name))))

    @classmethod
    def of(cls, error: BaseException, rank: int) -> "Failure":
        """Describe an error of this process."""
        is_ours = isinstance(error, LanewiseError)
        return cls(
            rank=rank,
            host=socket.gethostname(),
            note=heartbeat.note,
            kind=type(error).__name__,
            text=text_of(error),
            shown=describe(error) if is_ours else traceback_of(error),
            is_ours=is_ours,
            exit_code=error.exit_code if isinstance(error, LanewiseError) else 1,
        )

    def to_json(self) -> str:
        """Write it for the store."""
        return json.dumps(asdict(self))

    def __str__(self) -> str:
        where = f"rank {self.rank} on {self.host}"
        if self.is_ours:
            return f"{self.shown}\n({where})"
        return f"{where} failed in {described(self.note)}:\n{self.shown}"

    @property
    def summary(self) -> str:
        """One line that says what happened."""
        text = self.text.partition("\n")[0]
        return text if self.is_ours else f"{self.kind}: {text} (rank {self.rank} on {self.host})"

    def is_final(self, before: "Failure | None") -> bool:
        """Tell whether another start would come to the same end.

        So it would after a user's mistake, and where the start before ended at the same step with the same
        error. A lost host is none.
        """
        is_same = before is not None and _what(self) == _what(before) and self.kind not in _OF_LOST
        return self.exit_code == _MISTAKE or is_same


def _what(failure: Failure) -> tuple[object, ...]:
    """Return what the same error at the same step has in common; its text may name processes and ports."""
    return failure.kind, failure.note[1], re.sub(r"\d+", "N", failure.text)


def _cut(text: str) -> str:
    """Leave out the middle of a very long text."""
    if len(text) <= _MOST_CHARACTERS:
        return text
    half = _MOST_CHARACTERS // 2 - 50
    return f"{text[:half]}\n... {len(text) - 2 * half:,} characters are left out here ...\n{text[-half:]}"


def described(note: Note) -> str:
    """Write a note of a heartbeat as words."""
    phase, step, lane = note
    if step is None:
        return phase
    return f"{phase} of step {step + 1}" + ("" if lane is None else f", lane {lane}")


def is_consequence(error: BaseException) -> bool:
    """Tell whether an error says only that another process, or the way to it, is lost."""
    if isinstance(error, StorageError) and error.__cause__ is not None:
        error = error.__cause__  # a save fails if a rank that takes part in it is lost
    from torch.distributed import DistError  # noqa: PLC0415 - a launcher loads torch when it launches

    if isinstance(error, LostRankError | DistError):
        return True
    return type(error) is RuntimeError and _LOST.search(text_of(error)) is not None


def record_failure(failure: Failure) -> None:
    """Write a failure where torchrun, or our own agent, looks for that of this process, if one does."""
    path = os.environ.get(ERROR_FILE_VARIABLE)
    if not path:
        return
    message = {
        "message": f"{failure.kind}: {failure.text}",
        "errorCode": failure.exit_code,  # that of the first failure, whatever ends this process
        # What torchrun shows as the traceback.
        "extraInfo": {"py_callstack": str(failure), "timestamp": str(int(time.time()))},
    }
    temporary = Path(f"{path}.tmp")
    temporary.write_text(json.dumps({"message": message, "failure": asdict(failure)}), encoding="utf-8")
    temporary.replace(path)  # the agent may look, or end this process, at any moment


def recorded_failure(path: Path) -> Failure | None:
    """Return what a process recorded that could not tell the store, perhaps."""
    with suppress(OSError, ValueError, LookupError, TypeError):  # nothing, or of the user's own code
        failure: Failure = as_type(json.loads(path.read_bytes())["failure"], Failure)
        return failure
    return None
