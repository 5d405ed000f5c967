"""What a terminal shows in the end, when all carriage returns and movements of the cursor were followed."""

import os

import pyte

_WIDEST, _LONGEST = 400, 2000
"""Columns and lines: more than any command writes, so that a line that is too long is seen, not wrapped."""


def lines_left_on(terminal: int) -> list[str]:
    """Read what is written to a terminal until its last writer is gone; return the lines that are left."""
    screen = pyte.Screen(_WIDEST, _LONGEST)
    stream = pyte.ByteStream(screen)
    while True:
        try:
            stream.feed(os.read(terminal, 65536))
        except OSError:  # EIO
            return "\n".join(map(str.rstrip, screen.display)).rstrip("\n").split("\n")
