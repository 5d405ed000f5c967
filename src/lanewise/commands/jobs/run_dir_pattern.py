"""Finds, or makes, the run directory that a pattern stands for."""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime, timedelta
from itertools import count
from pathlib import Path

from lanewise.config.run import PLACEHOLDERS
from lanewise.errors import RunDirError
from lanewise.runs.dir import RunDir, cannot_be_written

_FORMS = dict(zip(PLACEHOLDERS, (r"(\d{8}-\d{6})", r"(\d+)"), strict=True))


def is_pattern(run_dir: str) -> bool:
    """Tell whether a path stands for a new run directory each time."""
    return any(placeholder in run_dir for placeholder in PLACEHOLDERS)


def find_or_make(pattern: str, *, newest: bool) -> str:
    """Make the run directory that a pattern stands for, which then is nobody else's.

    Args:
        pattern: a path with `{time}`, for the local time, or `{number}`, for the next number.
        newest: whether to return the newest one that holds a run, if there is one.

    Raises:
        RunDirError: if it cannot be made.
    """
    found = sorted(_matches(pattern))
    held = [path for _, path in found if RunDir(Path(path)).record.exists()]
    if newest and held:
        return held[-1]
    now, number = datetime.now().astimezone(), found[-1][0] + 1 if found else 1
    for attempt in count():
        path = pattern.replace("{time}", f"{now + timedelta(seconds=attempt):%Y%m%d-%H%M%S}")
        path = path.replace("{number}", str(number + attempt))
        try:
            os.makedirs(path)  # noqa: PTH103 - refuses one that another run has just made
        except FileExistsError:
            continue
        except OSError as error:
            raise cannot_be_written(Path(path), error) from None
        return path
    raise RunDirError(f"no name is left for {pattern}.")  # count() never ends


def _matches(pattern: str) -> Iterator[tuple[int, str]]:
    """Yield each run directory of a pattern with its number, which for `{time}` is that of its digits."""
    (placeholder,) = (known for known in PLACEHOLDERS if known in pattern)
    before, after = map(re.escape, Path(pattern).name.split(placeholder))
    with suppress(FileNotFoundError, NotADirectoryError):
        for path in Path(pattern).parent.iterdir():
            if match := re.fullmatch(before + _FORMS[placeholder] + after, path.name):
                yield int(match[1].replace("-", "")), str(path)
