"""Runs that cannot go on from a checkpoint."""

from lanewise.verify.diagnosis import Diagnosis
from lanewise.verify.evidence import Evidence


def _find(evidence: Evidence) -> str | None:
    failed = [f"{resumed.name}: {resumed.failure}" for resumed in evidence.resumed() if resumed.failure]
    return failed[0] if failed else None


DIAGNOSIS = Diagnosis(
    kind="saved state",
    cause="a run cannot go on from a checkpoint",
    find=_find,
    remedy="See what the error says.",
)
