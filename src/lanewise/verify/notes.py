"""What is not a mistake but worth knowing."""

from collections.abc import Iterator, Sequence

from lanewise.verify.diagnose import Finding
from lanewise.verify.diagnoses.diagnosis import listed
from lanewise.verify.evidence import Evidence

_INFLUENCES = {
    "forward": (
        "a sample has other outputs beside other samples, in evaluation mode too, as where padding is not "
        "masked or collate mixes samples"
    ),
    "loss": "the loss compares samples of a micro-batch with each other, as one with negatives among them",
    "unknown": (
        "the gradient of a micro-batch is not the mean of those of its samples, in evaluation mode too; it "
        "could not be told whether forward or loss makes it so"
    ),
}
"""How the micro-batch may have an influence that is no mistake."""


def notes(evidence: Evidence, findings: Sequence[Finding]) -> list[str]:
    """Say what is worth knowing; state is mentioned only where there are no findings."""
    found = [*_on_cut(evidence), *_on_metrics(evidence), *_on_reads(evidence)]
    return found if findings else [*found, *_on_state(evidence)]


def _on_cut(evidence: Evidence) -> Iterator[str]:
    cut = evidence.reference.cut
    influence = cut.in_evaluation_mode.influence if cut.in_evaluation_mode else ""
    if cut.why_not:
        yield f"it was not tested whether the loss is a mean of means: {cut.why_not}."
    if influence in _INFLUENCES:
        yield f"the result depends on micro_batch_size: {_INFLUENCES[influence]}."
    elif cut.statistics_of:
        yield (
            "the result depends on micro_batch_size: a forward uses statistics of its micro-batch, as "
            f"BatchNorm does ({cut.statistics_of})."
        )


def _on_metrics(evidence: Evidence) -> Iterator[str]:
    for metric in evidence.reference.metrics.of_micro_batches:
        one, two = metric.values
        yield (
            f"{metric.name} depends on micro_batch_size: two samples give {one:.6g} in one micro-batch, "
            f"and {two:.6g} in two."
        )


def _on_reads(evidence: Evidence) -> Iterator[str]:
    reads = evidence.base.reads
    if any(late != reads.samples[name][0] for name, late in reads.later.items()):
        yield (
            "the dataset draws random numbers, which are those of a lane: with another micro_batch_size "
            "samples are augmented otherwise."
        )
    if reads.opaque:
        yield (
            f"{listed(reads.opaque)} in samples or micro-batches was compared by type alone, since it has no "
            "state that can be read."
        )
    if reads.left_out and reads.is_by_content:
        yield (
            f"collate leaves {listed(reads.left_out)} out of a micro-batch, whatever their order: what it "
            "leaves out is not trained on."
        )


def _on_state(evidence: Evidence) -> Iterator[str]:
    """Say which state changed without an effect, such as a memo or a counter for a log."""
    changed, history = evidence.base.reads.changed, evidence.base.history
    if changed:
        yield f"reading samples changes {listed(changed)}; no sample that was read depends on it."
    names = [name for name in history.changed if name not in changed] if history else []
    if history is not None and names:
        yield (
            f"a forward changes {listed(names)}; {history.num_runs} runs of one micro-batch gave the same, "
            "whatever was run before."
        )
