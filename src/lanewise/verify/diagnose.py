"""From what the layouts found to the causes.

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

from dataclasses import dataclass

from lanewise.verify.diagnoses import forward, micro_batch, samples, saved_state, unexplained, weights
from lanewise.verify.diagnoses.diagnosis import Diagnosis
from lanewise.verify.evidence import Evidence

DIAGNOSES: tuple[Diagnosis, ...] = (
    # What shows in one process comes before what shows between two, and what says more before what says less.
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
    # Looked for only where nothing above was found.
    unexplained.failed_layout,
    unexplained.unequal_ranks,
    unexplained.state_in_steps,
    unexplained.of_the_rank,
    unexplained.of_unknown_cause,
    # What another run saved says nothing where an update already depends on more than what is saved.
    saved_state.failed_resume,
    saved_state.state_of_the_run,
    # What was not run explains nothing.
    unexplained.left_out,
)
"""In the order in which they are tried."""


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
