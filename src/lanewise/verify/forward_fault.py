"""Findings about forwards and backwards: what they depend on besides weights and batch, and change."""

from collections.abc import Iterator, Sequence

from lanewise.verify.finding import Finding, changing, drawn, hidden, listed
from lanewise.verify.layout import Layout
from lanewise.verify.operators import first_divergence


def talking(layouts: Sequence[Layout]) -> Iterator[Finding]:
    """Name forwards that are collectives."""
    for place, passes in (item for layout in layouts for item in layout.passes()):
        if passes.collectives:
            yield Finding(
                "the forward depends on the layout",
                f"it talks to other processes: {passes.collectives[0]} (on {place}).",
                "A lane must not see what other lanes compute, as SyncBatchNorm does: use BatchNorm, whose "
                "statistics are each lane's own and are merged after the step, or GroupNorm.",
            )


def passes_within(layouts: Sequence[Layout]) -> Iterator[Finding]:
    """Name what differs from forward to forward in one process."""
    for place, passes in (item for layout in layouts for item in layout.passes()):
        if passes.results[0] == passes.results[1]:
            continue
        seen = f"the same micro-batch, twice in {place}, gives another loss or gradient"
        divergence = first_divergence(*passes.calls)
        begins = f", first in {divergence.call}" if divergence else ""
        generators = [name for name in passes.changed if name.endswith("(a generator)")]
        if generators or (divergence and divergence.call.has_generator):
            yield drawn(f"{seen}{begins}", generators)
        elif divergence and divergence.has_equal_inputs and not divergence.has_equal_random_state:
            yield Finding(
                "the random state is set by the task",
                f"{seen}: before {divergence.call}, torch's default generators are in another state.",
                "Leave the default generators alone in forward and loss (no torch.manual_seed): they are "
                "seeded for every lane of every step.",
            )
        elif divergence and divergence.has_equal_inputs:
            yield Finding(
                "an operator is not deterministic",
                f"{seen}: {divergence.call} gave other outputs for equal inputs.",
                "Use a deterministic implementation of it.",
            )
        elif passes.changed:
            yield hidden(f"{seen}{begins}", passes.changed)
        else:
            yield Finding(
                "a value from outside of the model changes from forward to forward",
                f"{seen}; no operator that was recorded made the value that differs{begins}.",
                "Keep the time, counters and unseeded random numbers out of forward and loss.",
            )


def passes_between(reference: Layout, repeat: Layout, layouts: Sequence[Layout]) -> Iterator[Finding]:
    """Name what differs from process to process."""
    _, base = next(reference.passes())
    (_, base_reads), base_probe = next(reference.reads()), reference.results[0].probe
    for layout in layouts[1:]:
        for (place, passes), (_, reads), (_, result) in zip(
            layout.passes(), layout.reads(), layout.places(), strict=True
        ):
            if passes.results[0] == base.results[0] or reads.batch != base_reads.batch:
                continue
            if base_probe is None or result.probe is None or result.probe.weights != base_probe.weights:
                continue
            divergence = first_divergence(base.calls[0], passes.calls[0])
            begins = f", first in {divergence.call}" if divergence else ""
            on_what = "the process or the time" if layout is repeat else "the rank or the number of processes"
            yield Finding(
                f"the forward or the loss depends on {on_what}",
                f"the same micro-batch, with equal weights and random state, gives another loss or gradient "
                f"on {place} than in the first process{begins}.",
                "Let nothing but the batch, the weights and the default generators enter forward and loss: "
                "no rank, no number of processes (lanewise divides by the weight of the global batch), no "
                "time.",
            )


def histories(reference: Layout) -> Iterator[Finding]:
    """Name state that shows in a lane only after something else."""
    probe = reference.results[0].probe
    history = probe.history if probe else None
    if history is not None and history.found:
        yield changing(
            f"the first lane's micro-batch, {history.found}, gives another loss or gradient from equal "
            "weights, buffers and random state",
            history.changed,
        )


def parameters(layouts: Sequence[Layout]) -> Iterator[Finding]:
    """Name what changes parameters besides the optimizer."""
    remedy = (
        "Leave the weights to the optimizer. What a forward maintains (a moving average, a projection) "
        "differs between processes: make it a buffer, or a parametrization."
    )
    for place, passes in (item for layout in layouts for item in layout.passes()):
        if passes.changed_parameters:
            yield Finding(
                "a parameter is changed outside of the optimizer",
                f"a forward and backward in {place} changed {listed(passes.changed_parameters)}.",
                remedy,
            )
    for layout in layouts:
        for step in layout.trace.steps if layout.trace else ():
            if step.changed_outside:
                yield Finding(
                    "a parameter is changed outside of the optimizer",
                    f"{listed(step.changed_outside)} changed before the update of step {step.step} "
                    f"({layout.name}).",
                    remedy,
                )
