"""What this process is doing: a note for each phase, which a thread reads to see whether it makes progress.

A note is an assignment, which takes a tenth of a microsecond: no time is read, and nothing is sent.
"""

from typing import TypeAlias, final

START, DATA, FORWARD, BACKWARD = "start", "data", "forward", "backward"
COMMUNICATION, OPTIMIZER = "communication", "optimizer"
EVALUATION, SAVE, CALLBACK, OWN_CODE, DONE = "evaluation", "save", "callback", "own code", "done"
"""`own code` is what runs between the steps of the user's own loop, for as long as it likes."""

Note: TypeAlias = tuple[str, int | None, int | None]
"""A phase, its step and its lane; None before the first step, and where the phase is of no lane."""


@final
class Heartbeat:
    """The newest note of a process."""

    def __init__(self) -> None:
        self.note: Note = (START, None, None)
        """Assign a new one when a phase begins, or goes on with another lane."""
        self.has_trained = False
        """Whether the first step has ended, which may compile the model."""

        self.num_pieces = 0
        """How many pieces of files were written or verified: progress besides the notes."""
        self.evaluated = (0, 0)
        """Of the eval dataset that this process evaluates last: its micro-batches that are done, and all; 0
        where nobody knows how many, as of a stream."""

    @property
    def step(self) -> int | None:
        """The step of the newest note."""
        return self.note[1]


heartbeat = Heartbeat()
"""The heartbeat of this process."""
