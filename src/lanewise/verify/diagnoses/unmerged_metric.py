"""Metrics whose merged copies give another value than one copy that saw all samples."""

from lanewise.verify.diagnosis import Diagnosis
from lanewise.verify.evidence import Evidence


def _find(evidence: Evidence) -> str | None:
    found = [
        f"{metric.name} is {metric.values[0]:.6g} when one copy sees all samples, and "
        f"{metric.values[1]:.6g} when the states of several copies are merged"
        for metric in evidence.reference.metrics.unmerged
    ]
    return f"{'; '.join(found)}." if found else None


DIAGNOSIS = Diagnosis(
    kind="metrics",
    cause="a metric cannot be computed from merged states",
    find=_find,
    remedy="Keep all that it counts in states (add_state) whose dist_reduce_fx merges them: sums and counts, "
    "not means.",
)
