"""Compares what entered the model of several processes with that of one, where no loader tells it."""

from collections import Counter
from collections.abc import Iterator, Sequence
from operator import itemgetter

from lanewise.commands.verify.diagnose import Finding
from lanewise.commands.verify.foreign.compare import CannotTellError
from lanewise.commands.verify.foreign.program import Noted

_CUTS = {0: "rows", 1: "columns"}
"""The dimensions that may be the batch, by what a sample is then."""


def num_same_rows(ranks: Sequence[Noted], single: Noted) -> int:
    """Return in how many of the first updates several processes together trained on what one did.

    Raises:
        CannotTellError: not in the first one.
    """
    found = [
        (what, Counter(row for of_rank in of_ranks for row in of_rank), Counter(of_one))
        for what, of_ranks, of_one in _rows(ranks, single)
    ]
    same = [bool(several) and several == of_one for _, several, of_one in found]
    if not any(same[:1]):
        why = "no loader of torch gave out what was trained on"
        for what, several, of_one in filter(itemgetter(1), found[:1]):
            why += (
                f"; of {several.total()} {what} that entered the model in update 1 on {len(ranks)} processes "
                f"{(several & of_one).total()} are among the {of_one.total()} of one process"
            )
        raise CannotTellError(why)
    return (*same, False).index(False)


def look_at_rows(ranks: Sequence[Noted], single: Noted) -> Iterator[Finding | str]:
    """Look whether the first update of each rank had samples of its own, and all together those of one."""
    for what, of_ranks, of_one in list(_rows(ranks, single))[:1]:
        first, *others = map(Counter, of_ranks)
        if first and all(other == first for other in others):
            yield Finding(
                "ranks read the same samples",
                f"in update 1 the same {first.total()} {what} entered the model of each rank",
                "Let each rank draw a part of the batch, as by a generator that is seeded by the seed and "
                "the rank, or take its rows of a batch that all draw.",
            )
        elif first and sum(map(Counter, of_ranks), Counter()) == Counter(of_one):
            yield f"the {len(of_one)} {what} that entered the model in update 1 are those of one process"


def _rows(ranks: Sequence[Noted], single: Noted) -> Iterator[tuple[str, list[list[str]], list[str]]]:
    """Yield for each update what a sample is, the samples of each rank, and those of one process."""
    for updates in zip(*(noted["updates"] for noted in (*ranks, single)), strict=False):
        *of_ranks, of_one = (update.get("rows", {0: [], 1: []}) for update in updates)
        cut = next((cut for cut in _CUTS if sum(len(of[cut]) for of in of_ranks) == len(of_one[cut]) > 0), 0)
        yield _CUTS[cut], [of[cut] for of in of_ranks], of_one[cut]
