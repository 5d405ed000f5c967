"""Gradients of `close` that are not what rounding makes of equal ones."""

from lanewise.verify.diagnosis import Diagnosis
from lanewise.verify.evidence import Evidence


def _find(evidence: Evidence) -> str | None:
    for layout in evidence.layouts[1:]:
        close = layout.results[0].close if layout.results else None
        if close is not None and close.worst > 1 and not layout.differences:  # whose consequence it would be
            return f"{close.place} differs by {close.worst:.3g} times its bound in {layout.name}."
    return None


DIAGNOSIS = Diagnosis(
    kind="close",
    cause="gradients of close are farther apart than rounding explains",
    find=_find,
    remedy="Lanes with equal samples give different gradients. Use equality exact to see where.",
)
