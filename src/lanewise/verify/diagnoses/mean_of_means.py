"""Losses in which the weight of a sample, or of a term, depends on the micro-batch that it is in."""

from functools import partial

from lanewise.verify.cut import Influence
from lanewise.verify.diagnosis import Diagnosis
from lanewise.verify.evidence import Evidence


def _find(influence: Influence, how: str, evidence: Evidence) -> str | None:
    cut = evidence.reference.cut
    found = cut.in_evaluation_mode if cut else None
    if found is None or found.influence != influence:
        return None
    return (
        f"the same {found.num_samples} samples give different gradients as one micro-batch and as several of "
        f"one sample: they differ by {found.difference:.1%}, {how}."
    )


OF_SAMPLES = Diagnosis(
    kind="micro-batch",
    cause="the loss is a mean of means",
    find=partial(_find, "weights", "and only in how much each sample weighs"),
    remedy="Return Loss(sum, weight), or Loss.mean(value, weight), with the number of units that were "
    "averaged: tokens, pixels. A bare scalar counts as the mean over the samples.",
)
OF_TERMS = Diagnosis(
    kind="micro-batch",
    cause="a term of the loss has weights or targets of its micro-batch",
    find=partial(
        _find,
        "targets",
        "though a sample's outputs, and the gradient for them, don't depend on the outputs of the others",
    ),
    remedy="Add all terms up over the units that the weight counts: a mean over samples beside one over "
    "tokens is multiplied by a number that differs with each micro-batch. Take what targets and weights are "
    "made of (frequencies of classes, means) from the whole dataset.",
)
ONCE = Diagnosis(
    kind="micro-batch",
    cause="the loss has a term that counts once for each micro-batch",
    find=partial(
        _find, "term", "by the same amount whatever the samples are, as by a penalty on the weights"
    ),
    remedy="Multiply the term by the weight of the micro-batch: Loss(sum + weight * penalty, weight), or "
    "Loss.mean(mean + penalty, weight). Otherwise it grows with the number of lanes.",
)
