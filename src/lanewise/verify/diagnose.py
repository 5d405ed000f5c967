"""From what the layouts found to causes, each with its evidence and what to do about it.

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
"""

from collections.abc import Iterator, Sequence

from lanewise.verify.cut import CutProbe
from lanewise.verify.data_fault import left_out, reads_between, reads_within
from lanewise.verify.finding import Finding, changing, first, hidden, is_generator, listed, named
from lanewise.verify.forward_fault import histories, parameters, passes_between, passes_within, talking
from lanewise.verify.hidden import changed
from lanewise.verify.layout import Layout
from lanewise.verify.probe import Probe
from lanewise.verify.update import Updates


def diagnose(layouts: Sequence[Layout]) -> list[Finding]:
    """Name the causes of what differs.

    Args:
        layouts: one process, one process again, and the others.
    """
    reference, repeat, *_ = layouts
    base = reference.results[0]
    reads = base.probe.reads if base.probe else None
    findings = [
        *first(reads_within(layouts), reads_between(reference, repeat, layouts)),
        *first(_weights(reference, repeat, layouts)),
        *first(
            talking(layouts),
            passes_within(layouts),
            passes_between(reference, repeat, layouts),
            histories(reference),
        ),
        *first(parameters(layouts)),
        *first(_options(layouts)),
        *first(*([left_out(reads)] if reads else []), _cut(base.cut)),
        *_metrics(reference),
        *first(_close(layouts)),
    ]
    of_updates = first(_updates(base.updates))
    if not findings and not of_updates:
        findings += first(_evaluation(layouts), _rest(layouts))
    return [*findings, *(of_updates or first(_resumed(layouts)))]


def notes(reference: Layout, findings: Sequence[Finding]) -> list[str]:
    """Say what is no mistake but worth knowing, of state only where no finding is about it."""
    result = reference.results[0]
    on_state = _notes_on_state(result.probe) if not findings else ()
    return [*_notes_on_cut(result.cut), *_notes_on_reads(result.probe), *on_state]


def _notes_on_cut(cut: CutProbe | None) -> Iterator[str]:
    if cut is None:
        return
    if cut.why_not:
        yield f"not tested whether the loss is a mean of means: {cut.why_not}."
    if cut.in_evaluation_mode is not None and not (
        cut.in_evaluation_mode.is_same or cut.in_evaluation_mode.is_weighting
    ):
        yield (
            "the result depends on micro_batch_size: samples of a micro-batch influence each other in "
            "evaluation mode too, as negatives or padding that is not masked do."
        )
    elif cut.with_statistics is not None and not cut.with_statistics.is_same:
        yield (
            "the result depends on micro_batch_size: a forward uses statistics of its micro-batch, as "
            f"BatchNorm does ({cut.owners})."
        )


def _notes_on_reads(probe: Probe | None) -> Iterator[str]:
    if probe is None:
        return
    reads = probe.reads
    if reads.opaque:
        yield (
            f"not compared: {listed(reads.opaque)} in samples or micro-batches counts by its type alone: "
            "it has no state that can be told."
        )
    if reads.left_out and reads.is_by_content:
        yield (
            f"collate leaves {listed(reads.left_out)} out of a micro-batch, whatever their order: what it "
            "does not keep is not trained."
        )


def _notes_on_state(probe: Probe | None) -> Iterator[str]:
    """Say which state seemed to matter to nothing, as that of a memo or of a counter for a log does."""
    if probe is None:
        return
    if probe.reads.changed:
        yield f"reading samples changes {listed(probe.reads.changed)}; no sample that was read depends on it."
    history = probe.history
    names = [name for name in history.changed if name not in probe.reads.changed] if history else []
    if history is not None and names:
        yield (
            f"a forward changes {listed(names)}; {history.num_runs} runs of one micro-batch gave the same, "
            "whatever was run before."
        )


def _weights(reference: Layout, repeat: Layout, layouts: Sequence[Layout]) -> Iterator[Finding]:
    base = reference.results[0].probe
    for layout in layouts[1:]:
        for place, result in layout.places():
            if base is None or result.probe is None or result.probe.weights == base.weights:
                continue
            name = changed(base.weights, result.probe.weights)[0]
            on_what = "the process or the time" if layout is repeat else "the rank or the number of processes"
            yield Finding(
                f"the initial weights depend on {on_what}",
                f"build_model gives another {name} in {place} than in the first process.",
                "Let build_model draw from the default generators alone, seeded alike on every rank.",
            )


def _options(layouts: Sequence[Layout]) -> Iterator[Finding]:
    for layout in layouts[1:]:
        difference = layout.differences.get("options")
        if difference is not None:
            mine, theirs = difference.values
            yield Finding(
                "the learning rate or another option of the optimizer depends on the number of processes",
                f"{difference.place} is {mine} in one process and {theirs} in {layout.name}.",
                "Set them for the global batch, which is the same on any number of processes: the scheduler, "
                "the optimizer and parameter_groups must not ask for the world size.",
            )


def _cut(cut: CutProbe | None) -> Iterator[Finding]:
    if cut is None or cut.in_evaluation_mode is None or not cut.in_evaluation_mode.is_weighting:
        return
    found = cut.in_evaluation_mode
    yield Finding(
        "the loss is a mean of means",
        f"the same {found.num_samples} samples give another gradient as one micro-batch than as several "
        f"of one sample: {found.difference:.1%} apart, and only the weights of the samples differ.",
        "Return Loss(sum, weight), or Loss.mean(value, weight), with the number of units that were averaged: "
        "tokens, pixels. A bare scalar counts as the mean over the samples.",
    )


def _metrics(reference: Layout) -> Iterator[Finding]:
    for metric in reference.results[0].unmerged_metrics:
        yield Finding(
            "a metric is no merge of its states",
            f"{metric.name} is {metric.whole:.6g} when one copy sees all samples, and {metric.merged:.6g} "
            "when the states of two copies are merged.",
            "Keep all it counts in states (add_state) whose dist_reduce_fx merges them: sums and counts, not "
            "means.",
        )


def _close(layouts: Sequence[Layout]) -> Iterator[Finding]:
    for layout in layouts[1:]:
        close = layout.results[0].close if layout.results else None
        if close is not None and close.worst > 1 and not layout.differences:  # whose consequence it would be
            yield Finding(
                "gradients of close are farther apart than rounding explains",
                f"{close.place} differs by {close.worst:.3g} times its bound in {layout.name}.",
                "Equal lanes give other gradients: use equality exact to see where.",
            )


def _evaluation(layouts: Sequence[Layout]) -> Iterator[Finding]:
    """Name hidden state where only evaluations differ."""
    reference = layouts[0].trace
    for layout in layouts[1:]:
        if reference is not None and layout.trace is not None and set(layout.differences) == {"evaluation"}:
            difference = layout.differences["evaluation"]
            names = changed(reference.hidden, layout.trace.hidden)
            seen = (
                f"{difference.place} is {difference.values[0]} in one process and {difference.values[1]} in "
                f"{layout.name}, with equal weights"
            )
            if names:
                yield hidden(seen, names)


def _rest(layouts: Sequence[Layout]) -> Iterator[Finding]:
    for layout in layouts[1:]:
        if layout.failure:
            yield Finding(f"{layout.name} failed", layout.failure, "See what the error says.")
        for check, difference in layout.differences.items():
            assert layouts[0].trace is not None
            assert layout.trace is not None
            # Where the steps differ, what they changed differs with them: names only say where to look.
            names = changed(layouts[0].trace.hidden, layout.trace.hidden) or layout.trace.changed
            yield Finding(
                f"{check} differ, for a reason that was not found",
                f"{layout.name} and one process first part at {difference}: {difference.values[0]} in one "
                f"process, {difference.values[1]} there{named(names)}.",
                "Look for what depends on the rank, the number of processes or the forwards before.",
            )
        for rank, result in enumerate(layout.results):
            if result.trace is not None and layout.trace is not None and rank:
                for mine, theirs in zip(layout.trace.steps, result.trace.steps, strict=True):
                    if mine.weights != theirs.weights:
                        name = changed(mine.weights, theirs.weights)[0]
                        yield Finding(
                            "ranks hold different weights",
                            f"{name} differs between ranks 0 and {rank} of {layout.name} after step "
                            f"{mine.step}.",
                            "Leave the weights to the optimizer.",
                        )


def _updates(updates: Updates | None) -> Iterator[Finding]:
    """Name what an optimizer keeps or draws besides its state dict."""
    if updates is None or not updates.parameter:
        return
    seen = (
        f"another update from equal weights, gradients, optimizer state and random state gives another "
        f"{updates.parameter}"
    )
    if any(map(is_generator, updates.changed)):
        yield changing(seen, updates.changed)
    else:
        yield _not_saved(seen, updates.changed)


def _not_saved(seen: str, names: Sequence[str]) -> Finding:
    return Finding(
        "state that a checkpoint does not hold",
        f"{seen}{named(names)}.",
        "Keep it in a buffer, in the module's extra state (get_extra_state, set_extra_state) or in the "
        "optimizer's or scheduler's state_dict; or derive it from the step.",
    )


def _resumed(layouts: Sequence[Layout]) -> Iterator[Finding]:
    for layout in layouts:
        resumed = layout.resumed
        if resumed is None or not (resumed.differences or resumed.failure):
            continue
        if resumed.failure:
            yield Finding(f"{resumed.name} could not go on", resumed.failure, "See what the error says.")
            continue
        difference = next(iter(resumed.differences.values()))
        reference = layouts[0].trace
        assert reference is not None
        assert resumed.trace is not None
        names = changed(reference.hidden, resumed.trace.hidden)
        seen = f"{resumed.name} parts from the run that was not stopped at {difference} ({difference.check})"
        yield _not_saved(seen, names)
