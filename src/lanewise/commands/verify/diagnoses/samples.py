"""Samples and micro-batches that depend on more than the index and the random state of the lane."""

from collections.abc import Iterator

from lanewise.commands.verify.evidence import Evidence, also_changed, diagnosis, listed

_USE_THE_INDEX = (
    "Let __getitem__ and collate use only the index and the default generators of torch, numpy and random, "
    "which are seeded for each micro-batch. Let a stream yield the same whenever it is opened. "
    "What opens a file on the first read must draw nothing."
)


@diagnosis("samples", "a sample differs from read to read", _USE_THE_INDEX)
def sample_changes(evidence: Evidence) -> Iterator[str]:
    """Find samples that differ when the same process reads them again."""
    for process, probe in evidence.probes():
        reads = probe.reads
        twice = [name for name, (first, second) in reads.samples.items() if first != second]
        if twice:
            part, also = f"{len(twice)} of {len(reads.samples)} samples", also_changed(reads.changed)
            yield f"{twice[0]}, read twice in {process} under the same random state, differs ({part}){also}."


@diagnosis("samples", "a micro-batch differs from read to read", _USE_THE_INDEX)
def micro_batch_changes(evidence: Evidence) -> Iterator[str]:
    """Find micro-batches that differ when collate gets equal samples again."""
    for process, probe in evidence.probes():
        batch = probe.reads.batch
        for number, digest in enumerate(batch, 1):
            if digest != batch[0]:
                yield (
                    f"collate, called {number} times in {process} with equal samples under the same random "
                    f"state, gives a different micro-batch{also_changed(probe.reads.changed)}."
                )
        if probe.reads.far:
            far = listed(probe.reads.far)
            yield f"the first lane's micro-batch differs when it is read in {process} while {far} is far off."


@diagnosis("samples", "a sample depends on the loader's process", _USE_THE_INDEX)
def of_the_loader_process(evidence: Evidence) -> Iterator[str]:
    """Find samples that depend on the DataLoader worker that reads them."""
    for process, probe in evidence.probes():
        if probe.reads.batch_of_worker not in (None, probe.reads.batch[0]):
            yield f"the first lane's micro-batch differs between {process} and its DataLoader worker."


@diagnosis(
    "samples",
    "a stream ignores its lane",
    "Let iter_lane(epoch, lane, num_lanes) yield only what belongs to the lane, so that over all lanes each "
    "sample of an epoch comes once.",
)
def ignores_its_lane(evidence: Evidence) -> Iterator[str]:
    """Find lane-aware streams that give several lanes the same samples."""
    for lane, other in [evidence.base.reads.equal_lanes] if evidence.base.reads.equal_lanes else []:
        yield f"lanes {lane} and {other} have the same samples in the first two steps."


@diagnosis(
    "samples",
    "samples of an epoch depend on an earlier epoch",
    "Draw a sample's augmentation anew each time it is read: a cache must hold the sample without it. "
    "Another number of processes, or a resumed run, reads a sample for the first time in another epoch.",
)
def of_an_earlier_epoch(evidence: Evidence) -> Iterator[str]:
    """Find samples that keep the augmentation of an earlier epoch, as in a cache of augmented samples."""
    base = evidence.base.reads
    # Of the second half of the samples, the repeat read epoch 1 before epoch 0.
    other_order = set(list(base.later)[(len(base.later) + 1) // 2 :])
    for _, probe in evidence.again():
        differing = base.differing(probe.reads)
        if differing and set(differing) <= other_order:
            also = also_changed(probe.reads.changed)
            yield f"{differing[0]}, read as of epoch 1, differs if it was read as of epoch 0 before{also}."


@diagnosis(
    "samples",
    "samples depend on the process or the time",
    "Draw only from the default generators of torch, numpy and random: they are seeded for each micro-batch.",
)
def of_the_process(evidence: Evidence) -> Iterator[str]:
    """Find samples that differ between runs of one process, as by numbers that are drawn when it starts."""
    for _, probe in evidence.again():
        for name in evidence.base.reads.differing(probe.reads):
            yield f"{name} differs when the same process is started again."


@diagnosis(
    "samples",
    "the dataset shards itself by rank",
    "Return the whole dataset on every rank: lanewise distributes it, and each process reads its part.",
)
def sharded_dataset(evidence: Evidence) -> Iterator[str]:
    """Find datasets that give each rank only a part of the samples."""
    base = evidence.base.reads
    index_of = {digest: name for name, digest in base.others.items()}
    for process, probe in (*evidence.again(), *evidence.elsewhere()):
        reads = probe.reads
        if reads.num_samples != base.num_samples:
            yield f"it has {base.num_samples} samples in one process and {reads.num_samples} in {process}."
        differing = base.differing(reads)
        now = {name: reads.samples[name][0] for name in differing if name in reads.samples}
        moved = {name: index_of[digest] for name, digest in now.items() if digest in index_of}
        if len(moved) > len(differing) / 2:
            name, other = next(iter(moved.items()))
            yield f"{name} in {process} equals {other} in one process."


@diagnosis(
    "samples",
    "samples depend on the rank or the number of processes",
    "Let samples, and every seed, depend on the index alone, or in a stream on epoch and lane: not on the "
    "rank or the number of processes.",
)
def of_the_rank(evidence: Evidence) -> Iterator[str]:
    """Find samples that depend on the rank that reads them, or on how many ranks there are."""
    for process, probe in evidence.elsewhere():
        for name in evidence.base.reads.differing(probe.reads):
            yield f"{name} differs between {process} and one process."


@diagnosis(
    "samples",
    "collate depends on the process",
    "Let collate depend on the samples and the default generators alone. A set of texts has another "
    "order in each process: sort it.",
)
def collate_of_the_process(evidence: Evidence) -> Iterator[str]:
    """Find a collate that depends on the process, as one that iterates over a set of texts."""
    base = evidence.base.reads
    for process, probe in (*evidence.again(), *evidence.elsewhere()):
        if not base.differing(probe.reads) and probe.reads.batch[0] != base.batch[0]:
            yield f"equal samples give a different micro-batch in {process} than in one process."
