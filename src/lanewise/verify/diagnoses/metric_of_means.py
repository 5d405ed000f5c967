"""Metrics that average over micro-batches what these have by themselves, whatever their size."""

from lanewise.verify.diagnosis import Diagnosis
from lanewise.verify.evidence import Evidence


def _find(evidence: Evidence) -> str | None:
    found = [
        f"a sample that comes twice in one micro-batch counts for {metric.name} as if it came once: beside "
        f"another sample that gives {metric.values[0]:.6g}, and {metric.values[1]:.6g} where it comes in two"
        for metric in evidence.reference.metrics.of_means
    ]
    return f"{'; '.join(found)}." if found else None


DIAGNOSIS = Diagnosis(
    kind="metrics",
    cause="a metric is a mean of means",
    find=_find,
    remedy="Count sums and units in its states, or give the value of each sample: update(values), not "
    "update(values.mean()). A partial micro-batch weighs as much as a full one otherwise.",
)
