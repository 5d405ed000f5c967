"""Datasets that give each rank a part of the samples, as one does where nobody else shares them out."""

from lanewise.verify.diagnosis import Diagnosis
from lanewise.verify.evidence import Evidence


def _find(evidence: Evidence) -> str | None:
    base = evidence.base.reads
    index_of = {digest: name for name, digest in base.others.items()}
    for process, probe in (*evidence.again(), *evidence.elsewhere()):
        reads = probe.reads
        if reads.num_samples != base.num_samples:
            return f"it has {base.num_samples} samples in one process and {reads.num_samples} in {process}."
        differing = base.differing(reads)
        now = {name: reads.samples[name][0] for name in differing if name in reads.samples}
        moved = {name: index_of[digest] for name, digest in now.items() if digest in index_of}
        if len(moved) > len(differing) / 2:
            name, other = next(iter(moved.items()))
            return f"{name} in {process} equals {other} in one process."
    return None


DIAGNOSIS = Diagnosis(
    kind="samples",
    cause="the dataset shards itself by rank",
    find=_find,
    remedy="Return the whole dataset on every rank: lanewise distributes it, and each process reads its "
    "part.",
)
