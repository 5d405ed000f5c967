"""Metrics of which two merged copies don't give what one copy gives that saw all."""

from lanewise.verify.diagnosis import Diagnosis
from lanewise.verify.evidence import Evidence


def _find(evidence: Evidence) -> str | None:
    found = [
        f"{metric.name} is {metric.whole:.6g} when one copy sees all samples, and {metric.merged:.6g} when "
        "the states of two copies are merged"
        for metric in evidence.reference.unmerged_metrics
    ]
    return f"{'; '.join(found)}." if found else None


DIAGNOSIS = Diagnosis(
    kind="metrics",
    cause="a metric is no merge of its states",
    find=_find,
    remedy="Keep all it counts in states (add_state) whose dist_reduce_fx merges them: sums and counts, not "
    "means.",
)
