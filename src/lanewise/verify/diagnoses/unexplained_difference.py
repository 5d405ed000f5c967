"""Layouts that diverge from one process, though no other diagnosis knows why."""

from collections.abc import Sequence

from lanewise.verify.diagnosis import Diagnosis, also_changed
from lanewise.verify.evidence import Evidence, LayoutResult
from lanewise.verify.hidden import changed


def _of_the_rank(evidence: Evidence) -> str | None:
    """Conclude from what the other diagnoses did not find: one process, started again, gives the same."""
    if evidence.layouts[1].differences:
        return None
    found = _first_difference(evidence, evidence.layouts[2:])
    return found and f"{found}; one process gives the same each time that it is started."


def _unknown(evidence: Evidence) -> str | None:
    found = _first_difference(evidence, evidence.layouts[1:])
    return found and f"{found}."


def _first_difference(evidence: Evidence, layouts: Sequence[LayoutResult]) -> str | None:
    trace = evidence.reference.trace
    for layout in layouts:
        if not layout.differences:
            continue
        assert trace is not None
        assert layout.trace is not None
        check, difference = next(iter(layout.differences.items()))
        # Where the steps differ, what they changed differs with them: names only say where to look.
        names = changed(trace.hidden, layout.trace.hidden) or layout.trace.changed
        return (
            f"{layout.name} and one process first differ in {check}, at {difference}: {difference.values[0]} "
            f"in one process, {difference.values[1]} there{also_changed(names)}"
        )
    return None


OF_THE_RANK = Diagnosis(
    kind="unexplained",
    cause="a step depends on the rank, on the number of processes or on state that was not seen",
    find=_of_the_rank,
    remedy="Look at what makes it: forward and loss, a hook for gradients, the optimizer for weights, a "
    "metric for an evaluation. Nothing there may ask for a rank or a world size, of torch or of the "
    "environment, or keep something in a file.",
)
UNKNOWN = Diagnosis(
    kind="unexplained",
    cause="the layouts diverge for an unknown reason",
    find=_unknown,
    remedy="Look for a dependence on the process, on the time or on earlier forwards.",
)
