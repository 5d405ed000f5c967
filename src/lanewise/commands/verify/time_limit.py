"""How often the probes try: a number that is fixed, so that a slow machine finds what a quick one does."""

import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")
_SECONDS = 10.0


def in_time(each: Iterable[T], cut_short: list[str], what: str) -> Iterator[T]:
    """Yield each try, the first one at any rate; no more are begun after ten seconds, and that is noted.

    Args:
        each: the tries.
        cut_short: where to note that some were left out.
        what: is tried, as the subject of a sentence.
    """
    end = time.monotonic() + _SECONDS
    for number, one in enumerate(each):
        if number and time.monotonic() > end:
            cut_short.append(f"{what}: {number} were looked at within {_SECONDS:g} s, and no more of them.")
            return
        yield one
