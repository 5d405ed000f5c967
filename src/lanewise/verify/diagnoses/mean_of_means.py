"""Losses that are means over other units than those they are weighted by."""

from lanewise.verify.diagnosis import Diagnosis
from lanewise.verify.evidence import Evidence


def _find(evidence: Evidence) -> str | None:
    cut = evidence.reference.cut
    found = cut.in_evaluation_mode if cut else None
    if found is None or not found.is_weighting:
        return None
    return (
        f"the same {found.num_samples} samples give another gradient as one micro-batch than as several of "
        f"one sample: {found.difference:.1%} apart, and only the weights of the samples differ."
    )


DIAGNOSIS = Diagnosis(
    kind="micro-batch",
    cause="the loss is a mean of means",
    find=_find,
    remedy="Return Loss(sum, weight), or Loss.mean(value, weight), with the number of units that were "
    "averaged: tokens, pixels. A bare scalar counts as the mean over the samples.",
)
