"""Results that depend on which samples share a micro-batch: in collate, in the loss, in metrics."""

from collections.abc import Iterator
from functools import partial

from lanewise.commands.verify.cut import Influence
from lanewise.commands.verify.evidence import Diagnosis, Evidence, diagnosis, listed


@diagnosis(
    "micro-batch",
    "collate leaves samples out",
    "Let collate keep every sample that it is given: what it leaves out is trained by chance or never.",
)
def collate_leaves_out(evidence: Evidence) -> Iterator[str]:
    """Find a collate that drops samples for their place in the micro-batch."""
    reads = evidence.base.reads
    if reads.left_out and not reads.is_by_content:
        names = listed(reads.left_out)
        yield f"the first lane's micro-batch is the same without {names}; in another order, without others."


def _influence(influence: Influence, how: str, evidence: Evidence) -> Iterator[str]:
    """Find a loss in which the weight of a sample, or of a term, depends on the micro-batch that it is in."""
    cut = evidence.reference.cut
    if cut.influence == influence:
        parts = "one sample" if cut.part_size == 1 else f"{cut.part_size} samples"
        yield (
            f"the same {cut.num_samples} samples give different gradients as one micro-batch and as "
            f"several of {parts}: they differ by {cut.difference:.1%}, {how}."
        )


mean_of_means = Diagnosis(
    "micro-batch",
    "the loss is a mean of means",
    "Return Loss(sum, weight), or Loss.mean(value, weight), with the number of units that were "
    "averaged: tokens, pixels. A tensor without a weight is taken as the mean over the samples.",
    partial(_influence, "weights", "and only in how much each sample weighs"),
)
term_that_counts_once = Diagnosis(
    "micro-batch",
    "the loss has a term that counts once for each micro-batch",
    "Multiply the term by the weight of the micro-batch: Loss(sum + weight * penalty, weight), or "
    "Loss.mean(mean + penalty, weight). Otherwise it grows with the number of lanes.",
    partial(_influence, "term", "by the same amount for any samples, as with a penalty on the weights"),
)
mean_of_terms = Diagnosis(
    "micro-batch",
    "a term of the loss has weights or targets of its micro-batch",
    "A mean over samples beside one over tokens is multiplied by a number that differs with each "
    "micro-batch: return both as a list of Loss, each divided by its own weight (docs/losses.md), or add "
    "all terms up over the units that the weight counts. Take what targets and weights are "
    "made of (frequencies of classes, means) from the whole dataset.",
    partial(
        _influence,
        "targets",
        "though a sample's outputs, and the gradient for them, don't depend on the outputs of the others",
    ),
)


@diagnosis(
    "metrics",
    "a metric cannot be computed from merged states",
    "Keep all that it counts in states (add_state) that dist_reduce_fx merges: sums and counts, not means.",
)
def unmerged_metric(evidence: Evidence) -> Iterator[str]:
    """Find metrics whose merged copies give another value than one copy that saw all samples."""
    found = [
        f"{name} is {whole:.6g} when one copy sees all samples, and {merged:.6g} when the states of several "
        "copies are merged"
        for name, (whole, merged) in evidence.reference.metrics.unmerged.items()
    ]
    if found:
        yield f"{'; '.join(found)}."


@diagnosis(
    "metrics",
    "a metric is a mean of means",
    "Count sums and units in its states, or give the value of each sample: update(values), not "
    "update(values.mean()). A partial micro-batch weighs as much as a full one otherwise.",
)
def metric_of_means(evidence: Evidence) -> Iterator[str]:
    """Find metrics that average over micro-batches, whatever the size of these."""
    found = [
        f"a sample that comes twice in one micro-batch counts for {name} as if it came once: beside another "
        f"sample that gives {in_one:.6g}, and {in_two:.6g} where it comes in two"
        for name, (in_one, in_two) in evidence.reference.metrics.of_means.items()
    ]
    if found:
        yield f"{'; '.join(found)}."
