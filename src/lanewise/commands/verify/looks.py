"""How often the probes look: a number that is fixed, so that a slow machine finds what a quick one does."""

import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")
_SECONDS = 10.0


def looks(each: Iterable[T], cut_short: list[str], what: str) -> Iterator[T]:
    """Yield each look, the first one at any rate; no more are begun after ten seconds, and that is noted.

    Args:
        each: the looks.
        cut_short: where to note that some were left out.
        what: they look at, as the subject of a sentence.
    """
    end = time.monotonic() + _SECONDS
    for number, look in enumerate(each):
        if number and time.monotonic() > end:
            cut_short.append(f"{what}: {number} were looked at within {_SECONDS:g} s, and no more of them.")
            return
        yield look
