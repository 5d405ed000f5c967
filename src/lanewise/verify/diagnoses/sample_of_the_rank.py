"""Samples that depend on the rank that reads them, or on how many ranks there are."""

from lanewise.verify.diagnosis import Diagnosis
from lanewise.verify.evidence import Evidence


def _find(evidence: Evidence) -> str | None:
    for process, probe in evidence.elsewhere():
        differing = evidence.base.reads.differing(probe.reads)
        if differing:
            return f"{differing[0]} differs between {process} and one process."
    return None


DIAGNOSIS = Diagnosis(
    kind="samples",
    cause="samples depend on the rank or the number of processes",
    find=_find,
    remedy="Let the dataset depend on the index alone: neither the rank nor the number of processes belongs "
    "into it, or into a seed.",
)
