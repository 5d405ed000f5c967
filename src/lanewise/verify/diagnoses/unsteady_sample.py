"""Samples that are others when they are read again in the same process."""

from lanewise.verify.diagnosis import Diagnosis, also_changed
from lanewise.verify.evidence import Evidence

REMEDY = (
    "Let __getitem__ and collate depend on the index alone, and draw from the default generators of torch, "
    "numpy and random, which are seeded for every micro-batch; what opens a file on the first read must draw "
    "nothing."
)


def _find(evidence: Evidence) -> str | None:
    for process, probe in evidence.probes():
        reads = probe.reads
        twice = [name for name, (first, second) in reads.samples.items() if first != second]
        if twice:
            return (
                f"{twice[0]}, read twice in {process} under the same random state, differs "
                f"({len(twice)} of {len(reads.samples)} samples){also_changed(reads.changed)}."
            )
    return None


DIAGNOSIS = Diagnosis(kind="samples", cause="a sample differs from read to read", find=_find, remedy=REMEDY)
