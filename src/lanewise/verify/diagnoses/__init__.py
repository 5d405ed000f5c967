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
    one micro-batch, or many                        a mean of means
    one copy of a metric, or two merged             no merge of states

To add a diagnosis, add a file with its cause, how it is found and its remedy, and a line to `DIAGNOSES`.
`Evidence` has what each process noted: what its probes found, and what its steps were.
"""

from lanewise.verify.diagnoses import (
    beyond_the_bound,
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
    forward_of_the_rank.OF_THE_PROCESS,
    forward_of_the_rank.OF_THE_RANK,
    hidden_state.AFTER_OTHERS,
    changed_parameter.DIAGNOSIS,
    options_of_the_world_size.DIAGNOSIS,
    collate_that_leaves_out.DIAGNOSIS,
    mean_of_means.DIAGNOSIS,
    unmerged_metric.DIAGNOSIS,
    beyond_the_bound.DIAGNOSIS,
    unseeded_generator.IN_AN_UPDATE,
    unsaved_state.IN_AN_UPDATE,
    # Only where nothing above was found.
    hidden_state.IN_AN_EVALUATION,
    failed_layout.DIAGNOSIS,
    unexplained_difference.DIAGNOSIS,
    unequal_ranks.DIAGNOSIS,
    # What another run saved says nothing where an update already depends on more than what is saved.
    failed_resume.DIAGNOSIS,
    unsaved_state.IN_A_RESUMED_RUN,
    # What was not run explains nothing.
    left_out.DIAGNOSIS,
)
"""The first one of a kind that is found is named, and later ones of that kind are not looked for."""
