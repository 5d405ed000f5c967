"""Names the causes of differences between layouts, and notes what is worth knowing but no mistake.

The causes are functions in the files of `diagnoses/`; this file tries them in order.

No cause is recognized by the name of a class. It shows in what differs, and in what does not:

    what is done in two ways                        what differs if the two give different results
    ----------------------------------------------  -----------------------------------------------------
    the same read, twice in one process             items keep state, or draw from elsewhere
    the same read, in two runs of one process       items depend on the process or the time
    the same read, with and without an epoch before items keep what they drew
    the same read, on another rank                  items depend on the rank
    the same forward, twice in one process          hidden state, or the first operator that differs
    the same forward, on another rank               the forward depends on the rank
    the same forward, after others                  state that acts rarely, or keeps a batch
    the same update, again and again                the optimizer has state of its own
    weights before the optimizer and a step ago     something else changes them
    one micro-batch, or many                        a mean of means, a term that counts once
    one copy of a metric, or several merged         its states cannot be merged
    a sample twice, in one micro-batch or in two    a metric is a mean of means
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import get_args

from lanewise.commands.verify.diagnoses import (
    forward,
    micro_batch,
    samples,
    saved_state,
    unexplained,
    weights,
)
from lanewise.commands.verify.diagnoses.forward import NO_STATISTIC
from lanewise.commands.verify.evidence import Diagnosis, Evidence, Kind, listed

DIAGNOSES = sorted(
    (
        found
        for file in (samples, weights, forward, micro_batch, saved_state, unexplained)
        for found in vars(file).values()
        if isinstance(found, Diagnosis)
    ),
    key=lambda diagnosis: get_args(Kind).index(diagnosis.kind),
)
"""All diagnoses in the order in which they are tried: that of their kinds, within a kind that of its file."""

_INFLUENCES = {
    "forward": (
        "a sample has other outputs beside other samples, in evaluation mode too, as where padding is not "
        "masked or collate mixes samples"
    ),
    "loss": "the loss compares samples of a micro-batch with each other, as one with negatives among them",
    "unknown": (
        "the gradient of a micro-batch is not the mean of those of its samples, in evaluation mode too; it "
        "is unknown whether forward or loss makes it so"
    ),
}
"""How a micro-batch may influence the result without a mistake."""


@dataclass(frozen=True)
class Finding:
    """A reason why devices don't compute the same."""

    cause: str
    evidence: str
    remedy: str


def diagnose(evidence: Evidence) -> list[Finding]:
    """Name the causes of what differs.

    Of each kind the first one that is found is named, since later ones are mostly its consequences. So are
    `unexplained` ones where anything was found before them, and what a resumed run shows where an update
    already depends on state that is not saved.
    """
    findings: dict[Kind, Finding] = {}
    for diagnosis in DIAGNOSES:
        kind = diagnosis.kind
        if kind in findings or (kind == "unexplained" and findings):
            continue
        if kind == "resumed" and "saved state" in findings:
            continue
        found = next(diagnosis.find(evidence), None)
        if found is not None:
            findings[kind] = Finding(diagnosis.cause, found, diagnosis.remedy)
    return list(findings.values())


def notes(evidence: Evidence, findings: Sequence[Finding]) -> list[str]:
    """Return what is worth knowing; state is mentioned only where there are no findings."""
    kinds = (_on_cut, _on_metrics, _on_reads, _on_buffers, _on_time)
    found = [note for kind in kinds for note in kind(evidence)]
    return found if findings else [*found, *_on_state(evidence)]


def _on_cut(evidence: Evidence) -> Iterator[str]:
    cut = evidence.reference.cut
    if cut.why_not:
        yield f"it was not tested whether the loss is a mean of means: {cut.why_not}."
    if cut.influence in _INFLUENCES:
        yield f"the result depends on micro_batch_size: {_INFLUENCES[cut.influence]}."
    elif cut.statistics_of:
        yield (
            "the result depends on micro_batch_size: a forward uses statistics of its micro-batch, as "
            f"BatchNorm does ({cut.statistics_of})."
        )


def _on_metrics(evidence: Evidence) -> Iterator[str]:
    for name, (in_one, in_two) in evidence.reference.metrics.of_micro_batches.items():
        gives = f"two samples give {in_one:.6g} in one micro-batch, and {in_two:.6g} in two"
        yield f"{name} depends on micro_batch_size: {gives}."


def _on_reads(evidence: Evidence) -> Iterator[str]:
    reads = evidence.base.reads
    if any(late != reads.samples[name][0] for name, late in reads.later.items()):
        yield (
            "the dataset draws random numbers, which are those of a lane: with another micro_batch_size "
            "samples are augmented otherwise."
        )
    if reads.opaque:
        names = listed(reads.opaque)
        yield f"{names} in samples or micro-batches was compared by type alone: its state cannot be read."
    if reads.left_out and reads.is_by_content:
        names = listed(reads.left_out)
        yield f"collate leaves {names} out of a micro-batch, whatever their order: they are not trained on."


def _on_buffers(evidence: Evidence) -> Iterator[str]:
    if names := evidence.base.history.averaged:
        yield (
            f"lanes make different values of {listed(names)}, whose mean enters the next loss: right for a "
            f"statistic. {NO_STATISTIC}"
        )


def _on_time(evidence: Evidence) -> Iterator[str]:
    probe, reference = evidence.base, evidence.reference
    for found in (probe.reads, probe.history, reference.cut, reference.metrics):
        yield from found.cut_short


def _on_state(evidence: Evidence) -> Iterator[str]:
    """Yield which state changed without an effect, such as a memo or a counter for a log."""
    changed, history = evidence.base.reads.changed, evidence.base.history
    if changed:
        yield f"reading samples changes {listed(changed)}; no sample that was read depends on it."
    names = [name for name in history.changed if name not in changed]
    if names:
        runs = f"{history.num_runs} runs of one micro-batch gave the same, whatever was run before"
        yield f"a forward changes {listed(names)}; {runs}."
