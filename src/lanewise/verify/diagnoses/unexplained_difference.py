"""Layouts that diverge from one process for a reason that no other diagnosis knows."""

from lanewise.verify.diagnosis import Diagnosis, also_changed
from lanewise.verify.evidence import Evidence
from lanewise.verify.hidden import changed


def _find(evidence: Evidence) -> str | None:
    trace = evidence.reference.trace
    for layout in evidence.parted():
        assert trace is not None
        assert layout.trace is not None
        check, difference = next(iter(layout.differences.items()))
        # Where the steps differ, what they changed differs with them: names only say where to look.
        names = changed(trace.hidden, layout.trace.hidden) or layout.trace.changed
        return (
            f"{layout.name} and one process first differ in {check}, at {difference}: {difference.values[0]} "
            f"in one process, {difference.values[1]} there{also_changed(names)}."
        )
    return None


DIAGNOSIS = Diagnosis(
    kind="unexplained",
    cause="the layouts diverge for an unknown reason",
    find=_find,
    remedy="Look for a dependence on the rank, on the number of processes or on earlier forwards.",
)
