"""Names the causes of differences between layouts, and notes what is worth knowing but no mistake.

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

from lanewise.verify.diagnoses import forward, micro_batch, samples, saved_state, unexplained, weights
from lanewise.verify.diagnoses.base import Diagnosis, listed
from lanewise.verify.evidence import Evidence

DIAGNOSES: tuple[Diagnosis, ...] = (
    # Differences within one process come before those between two, and precise causes before general ones.
    samples.sample_changes,
    samples.micro_batch_changes,
    samples.of_the_loader_process,
    samples.of_an_earlier_epoch,
    samples.of_the_process,
    samples.sharded_dataset,
    samples.of_the_rank,
    samples.collate_of_the_process,
    weights.initial_of_the_process,
    weights.initial_of_the_rank,
    forward.communicates,
    forward.unseeded_generator,
    forward.sets_the_random_state,
    forward.operator_is_not_deterministic,
    forward.state_between_passes,
    forward.value_from_outside,
    forward.state_of_the_first,
    forward.of_the_process,
    forward.of_the_rank,
    forward.state_after_others,
    forward.evaluation_changes_a_buffer,
    weights.changed_parameter,
    weights.options_of_the_world_size,
    micro_batch.collate_leaves_out,
    micro_batch.mean_of_means,
    micro_batch.term_that_counts_once,
    micro_batch.mean_of_terms,
    micro_batch.unmerged_metric,
    micro_batch.metric_of_means,
    weights.beyond_the_bound,
    saved_state.generator_of_the_optimizer,
    saved_state.state_of_the_optimizer,
    # These are looked for only where nothing above was found.
    unexplained.failed_layout,
    unexplained.unequal_ranks,
    unexplained.state_in_steps,
    unexplained.of_the_rank,
    unexplained.of_unknown_cause,
    # A resumed run shows nothing new where an update already depends on state that is not saved.
    saved_state.failed_resume,
    saved_state.state_of_the_run,
    # Settings that were not run explain no difference.
    unexplained.left_out,
)
"""In the order in which they are tried."""


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
"""How a micro-batch may influence the result without a mistake."""


@dataclass(frozen=True)
class Finding:
    """A reason why devices don't compute the same."""

    cause: str
    evidence: str
    remedy: str


def diagnose(evidence: Evidence) -> list[Finding]:
    """Name the causes of what differs.

    Of each kind the first one that is found is named, since later ones are mostly its consequences.
    `unexplained` ones are looked for only where no diagnosis before them was found.
    """
    findings: list[Finding] = []
    kinds = set()
    for diagnosis in DIAGNOSES:
        if diagnosis.kind in kinds or (diagnosis.kind == "unexplained" and findings):
            continue
        found = next(diagnosis.find(evidence), None)
        if found is not None:
            findings.append(Finding(diagnosis.cause, found, diagnosis.remedy))
            kinds.add(diagnosis.kind)
    return findings


def notes(evidence: Evidence, findings: Sequence[Finding]) -> list[str]:
    """Return what is worth knowing; state is mentioned only where there are no findings."""
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
    for name, (one, two) in evidence.reference.metrics.of_micro_batches.items():
        gives = f"two samples give {one:.6g} in one micro-batch, and {two:.6g} in two"
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


def _on_state(evidence: Evidence) -> Iterator[str]:
    """Yield which state changed without an effect, such as a memo or a counter for a log."""
    changed, history = evidence.base.reads.changed, evidence.base.history
    if changed:
        yield f"reading samples changes {listed(changed)}; no sample that was read depends on it."
    names = [name for name in history.changed if name not in changed]
    if names:
        runs = f"{history.num_runs} runs of one micro-batch gave the same, whatever was run before"
        yield f"a forward changes {listed(names)}; {runs}."
