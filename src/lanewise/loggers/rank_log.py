"""Gives each rank a log file; the console belongs to rank 0."""

import io
import logging
import os
import sys
from pathlib import Path


def log_to(path: Path, *, is_rank_zero: bool) -> None:
    """Send python's logging and warnings to a file; on rank 0 also to the console.

    A record with `extra={"is_for_file_only": True}` stays off the console.

    On other ranks everything that is printed goes to the file, by the file descriptors, so that native code
    is included: otherwise each line of the user's code would appear once for each process.

    Args:
        path: the log file of this rank.
        is_rank_zero: whether the console is this process's.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("a", encoding="utf-8", buffering=1)
    to_file = logging.StreamHandler(file)
    to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    handlers: list[logging.Handler] = [to_file]
    if is_rank_zero:
        to_console = logging.StreamHandler(sys.stderr)
        to_console.addFilter(lambda record: not getattr(record, "is_for_file_only", False))
        handlers.append(to_console)
    else:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(line_buffering=True)  # as on a terminal: a killed rank keeps its lines
    logging.basicConfig(level=logging.INFO, handlers=handlers, format="%(message)s", force=True)
    logging.captureWarnings(True)
