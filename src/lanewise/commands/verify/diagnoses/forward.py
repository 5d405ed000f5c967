"""Forwards, losses and backwards that depend on more than weights, micro-batch and random state."""

from collections.abc import Iterator

from lanewise.commands.verify.evidence import Evidence, Probes, also_changed, diagnosis, first_in
from lanewise.commands.verify.hidden import generators
from lanewise.commands.verify.operators import first_divergence
from lanewise.engine.reachable import OR_MAKE_IT_ANEW, SEED_THEM

UNSEEDED = "random numbers from a generator that lanewise does not seed"
HIDDEN_STATE = "state outside of parameters and buffers"
NO_STATISTIC = (
    "A hidden state that is carried from batch to batch is none: the mean over the lanes mixes texts. See "
    "'A hidden state from batch to batch' in docs/own_loop.md; for a queue or a table docs/losses.md."
)
RESET_IT = (
    "Reset it at the beginning of each forward, or carry it in the batch. If it is a running statistic, make "
    "it a buffer (register_buffer): each lane of a step begins with the same value, and the mean over the "
    f"lanes follows. {NO_STATISTIC}"
)
_USE_THE_BATCH = (
    "Let nothing but the batch, the weights and the default generators enter forward and loss: no rank, no "
    "number of processes (lanewise divides by the weight of the global batch), no time."
)


@diagnosis(
    "forward",
    "the forward depends on other processes",
    "A lane must not see what other lanes compute, as SyncBatchNorm does: use BatchNorm, whose "
    "statistics are each lane's own and are merged after the step, or GroupNorm. A loss that compares the "
    "samples of all lanes is a task's batch_loss (docs/losses.md).",
)
def communicates(evidence: Evidence) -> Iterator[str]:
    """Find collectives in a forward or a backward, as in that of SyncBatchNorm."""
    for process, probe in evidence.probes():
        for call in probe.passes.collectives:
            yield f"it communicates with other processes by {call} (on {process})."


@diagnosis("forward", UNSEEDED, SEED_THEM)
def unseeded_generator(evidence: Evidence) -> Iterator[str]:
    """Find generators of random numbers that the model or the task has besides the default ones."""
    for seen, passes in evidence.unequal_passes():
        moved, divergence = generators(passes.changed), passes.divergence
        if moved or (divergence and divergence.call.has_generator):
            yield f"{seen}{first_in(divergence)}{also_changed(moved)}."
    history = evidence.base.history
    if history.differed_after and generators(history.changed):
        yield f"{history}{also_changed(generators(history.changed))}."


@diagnosis(
    "forward",
    "the random state is set by the task",
    "Do not seed in forward or loss (torch.manual_seed): lanewise seeds every lane of every step.",
)
def sets_the_random_state(evidence: Evidence) -> Iterator[str]:
    """Find forwards and losses that set the state of the default generators themselves."""
    for seen, passes in evidence.unequal_passes():
        divergence = passes.divergence
        if divergence and divergence.has_equal_inputs and not divergence.has_equal_random_state:
            yield f"{seen}: before {divergence.call}, torch's default generators are in another state."


@diagnosis("forward", "an operator is not deterministic", "Use a deterministic implementation of it.")
def operator_is_not_deterministic(evidence: Evidence) -> Iterator[str]:
    """Find operators that give other outputs for equal inputs."""
    for seen, passes in evidence.unequal_passes():
        if passes.divergence and passes.divergence.has_equal_inputs:
            yield f"{seen}: {passes.divergence.call} gave other outputs for equal inputs."


@diagnosis("forward", HIDDEN_STATE, RESET_IT)
def state_between_passes(evidence: Evidence) -> Iterator[str]:
    """Find state in attributes that one forward changes and the next one uses."""
    for seen, passes in evidence.unequal_passes():
        if passes.changed:
            yield f"{seen}{first_in(passes.divergence)}{also_changed(passes.changed)}."


@diagnosis(
    "forward",
    "a value from outside of the model changes from forward to forward",
    "Keep the time, counters and unseeded random numbers out of forward and loss.",
)
def value_from_outside(evidence: Evidence) -> Iterator[str]:
    """Find any passes that differ; the diagnoses before this one have found no other cause."""
    for seen, passes in evidence.unequal_passes():
        yield f"{seen}; no recorded operator made the value that differs{first_in(passes.divergence)}."


@diagnosis("forward", HIDDEN_STATE, RESET_IT)
def state_of_the_first(evidence: Evidence) -> Iterator[str]:
    """Find state that the first micro-batch of a process leaves behind."""
    for process, probe in evidence.other_results(evidence.again()):
        if probe.first:
            yield (
                f"the first lane's micro-batch gives another loss or gradient in {process}, where another "
                f"one was the first to be computed{also_changed(probe.first)}."
            )


@diagnosis("forward", "the forward or the loss depends on the process or the time", _USE_THE_BATCH)
def of_the_process(evidence: Evidence) -> Iterator[str]:
    """Find forwards and losses that differ when the same process is started again."""
    return _other_results(evidence, evidence.again())


@diagnosis(
    "forward", "the forward or the loss depends on the rank or the number of processes", _USE_THE_BATCH
)
def of_the_rank(evidence: Evidence) -> Iterator[str]:
    """Find forwards and losses that differ on another rank."""
    return _other_results(evidence, evidence.elsewhere())


def _other_results(evidence: Evidence, probes: Probes) -> Iterator[str]:
    for process, probe in evidence.other_results(probes):
        divergence = first_divergence(evidence.base.passes.calls[0], probe.passes.calls[0])
        yield (
            "the same micro-batch, with equal weights and random state, gives a different loss or "
            f"gradient in {process} than in the first process{first_in(divergence)}."
        )


@diagnosis("forward", HIDDEN_STATE, RESET_IT)
def state_after_others(evidence: Evidence) -> Iterator[str]:
    """Find state that acts only after other micro-batches, after an evaluation, or rarely."""
    history = evidence.base.history
    if history.differed_after:
        yield f"{history}{also_changed(history.changed)}."


@diagnosis(
    "forward",
    "an evaluation changes a buffer",
    "Change it in training alone (if self.training), and not in place where it ought to be constant: "
    "in an evaluation each process sees other micro-batches, and nothing merges what they make of it.",
)
def evaluation_changes_a_buffer(evidence: Evidence) -> Iterator[str]:
    """Find buffers that an evaluation changes, and on which its later micro-batches depend."""
    history = evidence.base.history
    if history.buffers:
        also = also_changed(history.buffers)
        yield f"the first lane's micro-batch, evaluated after another one, gives a different loss{also}."


@diagnosis(
    "generators",
    "a generator of random numbers that lanewise does not seed",
    f"{SEED_THEM} {OR_MAKE_IT_ANEW} One that only builds something can be a local variable.",
)
def own_generator(evidence: Evidence) -> Iterator[str]:
    """Find generators of model, task and data by which no result differed, yet."""
    base, history = evidence.base, evidence.base.history
    named = [name for _, passes in evidence.unequal_passes() for name in passes.changed]
    named += [
        *(history.changed if history.differed_after else ()),
        *(base.reads.changed if base.reads.are_unequal else ()),
    ]
    moved = "" if generators(named) else ", ".join(base.generators.moved)
    unmoved = ", ".join(base.generators.unmoved)
    drawn = f"the first lane's micro-batch draws from {moved}, though no result was seen to differ"
    kept = f"nothing was seen to draw from {unmoved}; what code that runs rarely draws cannot be seen"
    if moved or unmoved:
        yield "; ".join(filter(None, (moved and drawn, unmoved and kept))) + "."
