"""Losses whose mean is taken over other units than their weight counts."""

from lanewise.verify.diagnosis import Diagnosis
from lanewise.verify.evidence import Evidence


def _find(evidence: Evidence) -> str | None:
    cut = evidence.reference.cut
    found = cut.in_evaluation_mode if cut else None
    if found is None or not found.is_weighting:
        return None
    return (
        f"the same {found.num_samples} samples give different gradients as one micro-batch and as several of "
        f"one sample: they differ by {found.difference:.1%}, and only in how much each sample weighs."
    )


DIAGNOSIS = Diagnosis(
    kind="micro-batch",
    cause="the loss is a mean of means",
    find=_find,
    remedy="Return Loss(sum, weight), or Loss.mean(value, weight), with the number of units that were "
    "averaged: tokens, pixels. A bare scalar counts as the mean over the samples.",
)
