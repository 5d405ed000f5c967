"""From what the layouts found to causes, each with its evidence and what to do about it.

Nothing is known by a name or a class. A cause shows in what differs, and in what does not:

    the same read, twice in one process             items keep state, or draw from elsewhere
    the same read, in two runs of one process       ... from the process or the time
    the same read, on another rank                  ... from the rank
    the same forward, twice in one process          hidden state, or the first operator that differs
    the same forward, on another rank               ... from the rank
    weights before the optimizer and a step ago     changed by something else
    one micro-batch, or many                        a mean of means
    one copy of a metric, or two merged             no merge of states
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lanewise.verify.cut import CutProbe
from lanewise.verify.hidden import changed
from lanewise.verify.layout import Layout
from lanewise.verify.operators import first_divergence
from lanewise.verify.probe import Reads


@dataclass(frozen=True)
class Finding:
    """A reason why devices don't compute the same."""

    cause: str
    evidence: str
    remedy: str


def diagnose(layouts: Sequence[Layout]) -> list[Finding]:
    """Name the causes of what differs.

    Args:
        layouts: one process, one process again, and the others.
    """
    reference, repeat, *_ = layouts
    findings = [
        *_first(_reads_within(layouts), _reads_between(reference, repeat, layouts)),
        *_first(_weights(reference, repeat, layouts)),
        *_first(_talking(layouts), _passes_within(layouts), _passes_between(reference, repeat, layouts)),
        *_first(_parameters(layouts)),
        *_first(_options(layouts)),
        *_cut(reference.results[0].cut),
        *_metrics(reference),
        *_first(_close(layouts)),
    ]
    if not findings:
        findings += _first(_evaluation(layouts), _rest(layouts))
    return [*findings, *_first(_resumed(layouts))]


def notes(reference: Layout) -> list[str]:
    """Say what is no mistake but worth knowing."""
    found = []
    cut = reference.results[0].cut
    if cut is None:
        return []
    if cut.why_not:
        found.append(f"not tested whether the loss is a mean of means: {cut.why_not}.")
    if cut.in_evaluation_mode is not None and not (
        cut.in_evaluation_mode.is_same or cut.in_evaluation_mode.is_weighting
    ):
        found.append(
            "the result depends on micro_batch_size: samples of a micro-batch influence each other in "
            "evaluation mode too, as negatives or padding that is not masked do."
        )
    elif cut.with_statistics is not None and not cut.with_statistics.is_same:
        found.append(
            "the result depends on micro_batch_size: a forward uses statistics of its micro-batch, as "
            f"BatchNorm does ({cut.owners})."
        )
    return found


def _first(*candidates: Iterator[Finding]) -> list[Finding]:
    """Return the first finding: those after it are mostly its consequences."""
    for found in candidates:
        for finding in found:
            return [finding]
    return []


def _reads_within(layouts: Sequence[Layout]) -> Iterator[Finding]:
    remedy = (
        "Let __getitem__ and collate depend on the index alone, and draw from the default generators of "
        "torch, numpy and random, which are seeded for every sample."
    )
    for place, reads in (item for layout in layouts for item in layout.reads()):
        twice = [index for index, (first, second) in reads.samples.items() if first != second]
        if twice:
            yield Finding(
                "a sample differs from read to read",
                f"sample {twice[0]}, read twice in {place} under the same random state, is another one "
                f"({len(twice)} of {len(reads.samples)} samples){_named(reads.changed)}.",
                remedy,
            )
        if reads.batch[0] != reads.batch[1]:
            yield Finding(
                "a micro-batch differs from read to read",
                f"collate, called twice in {place} with equal samples under the same random state, gives "
                f"another micro-batch{_named(reads.changed)}.",
                remedy,
            )
        if reads.batch_of_worker not in (None, reads.batch[0]):
            yield Finding(
                "a sample depends on the loader's process",
                f"the first lane's micro-batch, read in {place} and in a DataLoader worker of it, is "
                "another one.",
                remedy,
            )


def _reads_between(reference: Layout, repeat: Layout, layouts: Sequence[Layout]) -> Iterator[Finding]:
    _, base = next(reference.reads())
    for layout in layouts[1:]:
        for place, reads in layout.reads():
            if reads.num_samples != base.num_samples:
                yield _sharded(
                    f"it has {base.num_samples} samples in one process and {reads.num_samples} on {place}"
                )
            differing = [i for i, digests in reads.samples.items() if base.samples.get(i) != digests]
            if differing and layout is repeat:
                yield Finding(
                    "samples depend on the process or the time",
                    f"sample {differing[0]} is another one when the same process is started again.",
                    "Draw from the default generators of torch, numpy and random, which are seeded for every "
                    "sample, and from nothing else.",
                )
            moved = _moved(base, reads, differing)
            if len(moved) > len(differing) / 2:
                index, other = next(iter(moved.items()))
                yield _sharded(f"sample {index} is on {place} what sample {other} is in one process")
            if differing:
                yield Finding(
                    "samples depend on the rank or the number of processes",
                    f"sample {differing[0]} is another one on {place} than in one process.",
                    "Let the dataset depend on the index alone: neither the rank nor the number of processes "
                    "belongs into it, or into a seed.",
                )
            if not differing and reads.batch != base.batch:
                yield Finding(
                    "collate depends on the process",
                    f"equal samples give another micro-batch on {place} than in one process.",
                    "Let collate depend on the samples and the default generators alone.",
                )


def _moved(base: Reads, reads: Reads, indices: Sequence[int]) -> dict[int, int]:
    """Return for those samples that the reference has under another index that index."""
    places = {digest: index for index, digest in base.others.items()}
    return {i: places[reads.samples[i][0]] for i in indices if reads.samples[i][0] in places}


def _sharded(evidence: str) -> Finding:
    return Finding(
        "the dataset shards itself by rank",
        f"{evidence}.",
        "Return the whole dataset on every rank: lanewise shares it out, and each process reads its part.",
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


def _talking(layouts: Sequence[Layout]) -> Iterator[Finding]:
    for place, passes in (item for layout in layouts for item in layout.passes()):
        if passes.collectives:
            yield Finding(
                "the forward depends on the layout",
                f"it talks to other processes: {passes.collectives[0]} (on {place}).",
                "A lane must not see what other lanes compute, as SyncBatchNorm does: use BatchNorm, whose "
                "statistics are each lane's own and are merged after the step, or GroupNorm.",
            )


def _passes_within(layouts: Sequence[Layout]) -> Iterator[Finding]:
    for place, passes in (item for layout in layouts for item in layout.passes()):
        if passes.results[0] == passes.results[1]:
            continue
        seen = f"the same micro-batch, twice in {place}, gives another loss or gradient"
        divergence = first_divergence(*passes.calls)
        begins = f", first in {divergence.call}" if divergence else ""
        generators = [name for name in passes.changed if name.endswith("(a generator)")]
        if generators or (divergence and divergence.call.has_generator):
            yield Finding(
                "random numbers from a generator that lanewise does not seed",
                f"{seen}{begins}{_named(generators)}.",
                "Draw from the default generators of torch, numpy and random: they are seeded for every lane "
                "of every step.",
            )
        elif divergence and divergence.has_equal_inputs:
            yield Finding(
                "an operator is not deterministic",
                f"{seen}: {divergence.call} gave other outputs for equal inputs.",
                "Use a deterministic implementation of it.",
            )
        elif passes.changed:
            yield _hidden(f"{seen}{begins}", passes.changed)
        else:
            yield Finding(
                "a value from outside of the model changes from forward to forward",
                f"{seen}; no operator that was recorded made the value that differs{begins}.",
                "Keep the time, counters and unseeded random numbers out of forward and loss.",
            )


def _passes_between(reference: Layout, repeat: Layout, layouts: Sequence[Layout]) -> Iterator[Finding]:
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


def _hidden(seen: str, names: Sequence[str]) -> Finding:
    return Finding(
        "state outside of parameters and buffers",
        f"{seen}{_named(names)}.",
        "Make it a buffer (register_buffer): buffers start each lane with the same value, are merged over "
        "the lanes, and are in checkpoints.",
    )


def _parameters(layouts: Sequence[Layout]) -> Iterator[Finding]:
    remedy = (
        "Leave the weights to the optimizer. What a forward maintains (a moving average, a projection) "
        "differs between processes: make it a buffer, or a parametrization."
    )
    for place, passes in (item for layout in layouts for item in layout.passes()):
        if passes.changed_parameters:
            yield Finding(
                "a parameter is changed outside of the optimizer",
                f"a forward and backward in {place} changed {_listed(passes.changed_parameters)}.",
                remedy,
            )
    for layout in layouts:
        for step in layout.trace.steps if layout.trace else ():
            if step.changed_outside:
                yield Finding(
                    "a parameter is changed outside of the optimizer",
                    f"{_listed(step.changed_outside)} changed before the update of step {step.step} "
                    f"({layout.name}).",
                    remedy,
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
        if close is not None and close.worst > 1:
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
                yield _hidden(seen, names)


def _rest(layouts: Sequence[Layout]) -> Iterator[Finding]:
    for layout in layouts[1:]:
        if layout.failure:
            yield Finding(f"{layout.name} failed", layout.failure, "See what the error says.")
        for check, difference in layout.differences.items():
            yield Finding(
                f"{check} differ, for a reason that was not found",
                f"{layout.name} and one process first part at {difference}: {difference.values[0]} in one "
                f"process, {difference.values[1]} there.",
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
        yield Finding(
            "state that a checkpoint does not hold",
            f"{resumed.name} parts from the run that was not stopped at {difference} ({difference.check})"
            f"{_named(names)}.",
            "Keep it in a buffer, in the module's extra state (get_extra_state, set_extra_state) or in the "
            "optimizer's or scheduler's state_dict; or derive it from the step.",
        )


def _named(names: Sequence[str]) -> str:
    return f"; what changed besides: {_listed(names)}" if names else ""


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
