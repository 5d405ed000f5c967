"""All diagnoses, in the order in which they are tried.

Nothing is known by a name or a class. A cause shows in what differs, and in what does not:

    the same read, twice in one process             items keep state, or draw from elsewhere
    the same read, in two runs of one process       ... from the process or the time
    the same read, with and without an epoch before items keep what they drew
    the same read, on another rank                  ... from the rank
    the same forward, twice in one process          hidden state, or the first operator that differs
    the same forward, on another rank               ... from the rank
    the same forward, after others                  state that acts rarely, or keeps a batch
    the same update, again and again                state of the optimizer's own
    weights before the optimizer and a step ago     changed by something else
    one micro-batch, or many                        a mean of means, a term that counts once
    one copy of a metric, or several merged         no merge of states
    a sample twice, in one micro-batch or in two    a metric that is a mean of means

To add a diagnosis, add a file with its cause, how it is found and its remedy, and a line to `DIAGNOSES`.
`Evidence` has what each process noted: what its probes found, and what its steps were.
"""

from lanewise.verify.diagnoses import (
    beyond_the_bound,
    changed_buffer,
    changed_parameter,
    collate_of_the_process,
    collate_that_leaves_out,
    failed_layout,
    failed_resume,
    forward_of_the_rank,
    forward_that_communicates,
    hidden_state,
    initial_weights,
    left_out,
    mean_of_means,
    metric_of_means,
    options_of_the_world_size,
    sample_of_an_earlier_epoch,
    sample_of_the_loader_process,
    sample_of_the_process,
    sample_of_the_rank,
    seeds_in_the_forward,
    sharded_dataset,
    unequal_ranks,
    unexplained_difference,
    unmerged_metric,
    unsaved_state,
    unseeded_generator,
    unsteady_micro_batch,
    unsteady_operator,
    unsteady_sample,
    value_from_outside,
)
from lanewise.verify.diagnosis import Diagnosis

DIAGNOSES: tuple[Diagnosis, ...] = (
    # What shows in one process comes before what shows between two, and what says more before what says less.
    unsteady_sample.DIAGNOSIS,
    unsteady_micro_batch.DIAGNOSIS,
    sample_of_the_loader_process.DIAGNOSIS,
    sample_of_an_earlier_epoch.DIAGNOSIS,
    sample_of_the_process.DIAGNOSIS,
    sharded_dataset.DIAGNOSIS,
    sample_of_the_rank.DIAGNOSIS,
    collate_of_the_process.DIAGNOSIS,
    initial_weights.OF_THE_PROCESS,
    initial_weights.OF_THE_RANK,
    forward_that_communicates.DIAGNOSIS,
    unseeded_generator.IN_A_FORWARD,
    seeds_in_the_forward.DIAGNOSIS,
    unsteady_operator.DIAGNOSIS,
    hidden_state.BETWEEN_PASSES,
    value_from_outside.DIAGNOSIS,
    hidden_state.OF_THE_FIRST,
    forward_of_the_rank.OF_THE_PROCESS,
    forward_of_the_rank.OF_THE_RANK,
    hidden_state.AFTER_OTHERS,
    changed_buffer.DIAGNOSIS,
    changed_parameter.DIAGNOSIS,
    options_of_the_world_size.DIAGNOSIS,
    collate_that_leaves_out.DIAGNOSIS,
    mean_of_means.OF_SAMPLES,
    mean_of_means.ONCE,
    mean_of_means.OF_TERMS,
    unmerged_metric.DIAGNOSIS,
    metric_of_means.DIAGNOSIS,
    beyond_the_bound.DIAGNOSIS,
    unseeded_generator.IN_AN_UPDATE,
    unsaved_state.IN_AN_UPDATE,
    # Only where nothing above was found.
    failed_layout.DIAGNOSIS,
    unequal_ranks.DIAGNOSIS,
    hidden_state.IN_STEPS,
    unexplained_difference.OF_THE_RANK,
    unexplained_difference.UNKNOWN,
    # What another run saved says nothing where an update already depends on more than what is saved.
    failed_resume.DIAGNOSIS,
    unsaved_state.IN_A_RESUMED_RUN,
    # What was not run explains nothing.
    left_out.DIAGNOSIS,
)
"""The first one of a kind that is found is named, and later ones of that kind are not looked for."""
