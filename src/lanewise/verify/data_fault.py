"""Findings about samples and micro-batches: what they depend on besides their index."""

from collections.abc import Iterator, Sequence

from lanewise.verify.finding import Finding, listed, named
from lanewise.verify.layout import Layout
from lanewise.verify.read import Reads


def reads_within(layouts: Sequence[Layout]) -> Iterator[Finding]:
    """Name what differs from read to read in one process."""
    remedy = (
        "Let __getitem__ and collate depend on the index alone, and draw from the default generators of "
        "torch, numpy and random, which are seeded for every sample."
    )
    for place, reads in (item for layout in layouts for item in layout.reads()):
        twice = [name for name, (first, second) in reads.samples.items() if first != second]
        if twice:
            yield Finding(
                "a sample differs from read to read",
                f"{twice[0]}, read twice in {place} under the same random state, is another one "
                f"({len(twice)} of {len(reads.samples)} samples){named(reads.changed)}.",
                remedy,
            )
        if len(set(reads.batch)) > 1:
            number = next(number for number, one in enumerate(reads.batch, 1) if one != reads.batch[0])
            yield Finding(
                "a micro-batch differs from read to read",
                f"collate, called {number} times in {place} with equal samples under the same random state, "
                f"gives another micro-batch{named(reads.changed)}.",
                remedy,
            )
        if reads.batch_of_worker not in (None, reads.batch[0]):
            yield Finding(
                "a sample depends on the loader's process",
                f"the first lane's micro-batch, read in {place} and in a DataLoader worker of it, is "
                "another one.",
                remedy,
            )


def reads_between(reference: Layout, repeat: Layout, layouts: Sequence[Layout]) -> Iterator[Finding]:
    """Name what differs from process to process."""
    _, base = next(reference.reads())
    for layout in layouts[1:]:
        for place, reads in layout.reads():
            if reads.num_samples != base.num_samples:
                yield _sharded(
                    f"it has {base.num_samples} samples in one process and {reads.num_samples} on {place}"
                )
            differing = _differing(base, reads)
            if differing and layout is repeat:
                # The repeat read the first half in the same order, and the second half as of epoch 1 first.
                if set(differing) <= set(list(base.later)[(len(base.later) + 1) // 2 :]):
                    yield _earlier(differing[0], reads)
                yield Finding(
                    "samples depend on the process or the time",
                    f"{differing[0]} is another one when the same process is started again.",
                    "Draw from the default generators of torch, numpy and random, which are seeded for every "
                    "sample, and from nothing else.",
                )
            moved = _moved(base, reads, differing)
            if len(moved) > len(differing) / 2:
                name, other = next(iter(moved.items()))
                yield _sharded(f"{name} is on {place} what {other} is in one process")
            if differing:
                yield Finding(
                    "samples depend on the rank or the number of processes",
                    f"{differing[0]} is another one on {place} than in one process.",
                    "Let the dataset depend on the index alone: neither the rank nor the number of processes "
                    "belongs into it, or into a seed.",
                )
            if not differing and reads.batch[0] != base.batch[0]:
                yield Finding(
                    "collate depends on the process",
                    f"equal samples give another micro-batch on {place} than in one process.",
                    "Let collate depend on the samples and the default generators alone. A set of texts has "
                    "another order in each process: sort it.",
                )


def left_out(reads: Reads) -> Iterator[Finding]:
    """Name samples that a micro-batch lacks because of their place in it."""
    if reads.left_out and not reads.is_by_content:
        yield Finding(
            "collate leaves samples out",
            f"the first lane's micro-batch is the same without {listed(reads.left_out)}; in another order it "
            "is the same without others.",
            "Let collate keep every sample that it is given: what it leaves out is trained in no epoch, or "
            "in one by chance.",
        )


def _differing(base: Reads, reads: Reads) -> list[str]:
    """Return the names of samples that are others, as of any epoch; those of epoch 0 first."""
    found = [name for name, digests in reads.samples.items() if base.samples.get(name) != digests]
    return found + [
        name for name, one in reads.later.items() if base.later.get(name) != one and name not in found
    ]


def _earlier(name: str, reads: Reads) -> Finding:
    return Finding(
        "samples of an epoch depend on an earlier epoch",
        f"{name}, read as epoch 1 sees it, is another one if it was read as epoch 0 sees it before"
        f"{named(reads.changed)}.",
        "Draw a sample's augmentation anew each time it is read: a cache must hold what is before it. "
        "Another number of processes, or a resumed run, reads a sample for the first time in another epoch.",
    )


def _moved(base: Reads, reads: Reads, names: Sequence[str]) -> dict[str, str]:
    """Return for those samples that the reference has under another name that name."""
    places = {digest: name for name, digest in base.others.items()}
    now = {name: reads.samples[name][0] for name in names if name in reads.samples}
    return {name: places[one] for name, one in now.items() if one in places}


def _sharded(evidence: str) -> Finding:
    return Finding(
        "the dataset shards itself by rank",
        f"{evidence}.",
        "Return the whole dataset on every rank: lanewise shares it out, and each process reads its part.",
    )
