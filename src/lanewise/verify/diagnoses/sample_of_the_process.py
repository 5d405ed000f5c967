"""Samples that are others in each process that is started, as by what was drawn at its start."""

from lanewise.verify.diagnosis import Diagnosis
from lanewise.verify.evidence import Evidence


def _find(evidence: Evidence) -> str | None:
    for _, probe in evidence.again():
        differing = evidence.base.reads.differing(probe.reads)
        if differing:
            return f"{differing[0]} differs when the same process is started again."
    return None


DIAGNOSIS = Diagnosis(
    kind="samples",
    cause="samples depend on the process or the time",
    find=_find,
    remedy="Draw from the default generators of torch, numpy and random, which are seeded for every "
    "micro-batch, and from nothing else.",
)
