"""Layouts that fail, though one process does not."""

from lanewise.verify.diagnosis import Diagnosis
from lanewise.verify.evidence import Evidence


def _find(evidence: Evidence) -> str | None:
    failed = [f"{layout.name}: {layout.failure}" for layout in evidence.layouts if layout.failure]
    return failed[0] if failed else None


DIAGNOSIS = Diagnosis(
    kind="unexplained",
    cause="the run fails on another number of processes",
    find=_find,
    remedy="See what the error says.",
)
