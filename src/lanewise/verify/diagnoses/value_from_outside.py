"""Forwards and losses that something else enters: the time, a counter, numbers of numpy."""

from lanewise.verify.diagnosis import Diagnosis, first_in
from lanewise.verify.evidence import Evidence


def _find(evidence: Evidence) -> str | None:
    """Return the first two passes that differ: diagnoses before this one know all else that it may be."""
    for seen, passes in evidence.unequal_passes():
        begins = first_in(passes.divergence)
        return f"{seen}; no operator that was recorded made the value that differs{begins}."
    return None


DIAGNOSIS = Diagnosis(
    kind="forward",
    cause="a value from outside of the model changes from forward to forward",
    find=_find,
    remedy="Keep the time, counters and unseeded random numbers out of forward and loss.",
)
