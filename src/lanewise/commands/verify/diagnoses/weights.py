"""Weights that are built otherwise, parameters and options that change wrongly, and gradients of `close`."""

from collections.abc import Iterator

from lanewise.commands.verify.evidence import Evidence, Probes, diagnosis, listed
from lanewise.commands.verify.hidden import changed

_SEED_ALIKE = "Let build_model draw from the default generators alone, seeded alike on every rank."


@diagnosis("initial weights", "the initial weights depend on the process or the time", _SEED_ALIKE)
def initial_of_the_process(evidence: Evidence) -> Iterator[str]:
    """Find models that are built with other weights when the same process is started again."""
    return _built_otherwise(evidence, evidence.again())


@diagnosis(
    "initial weights", "the initial weights depend on the rank or the number of processes", _SEED_ALIKE
)
def initial_of_the_rank(evidence: Evidence) -> Iterator[str]:
    """Find models that are built with other weights on another rank."""
    return _built_otherwise(evidence, evidence.elsewhere())


def _built_otherwise(evidence: Evidence, probes: Probes) -> Iterator[str]:
    for process, probe in probes:
        for name in changed(evidence.base.weights, probe.weights):
            yield f"build_model gives a different {name} in {process} than in the first process."


@diagnosis(
    "parameters",
    "a parameter is changed outside of the optimizer",
    "Leave the weights to the optimizer. What a forward maintains (a moving average, a projection) "
    "differs between processes: make it a buffer, or a parametrization.",
)
def changed_parameter(evidence: Evidence) -> Iterator[str]:
    """Find parameters that a forward, a backward or anything else but the optimizer changes."""
    for process, probe in evidence.probes():
        if probe.passes.changed_parameters:
            yield f"a forward and backward in {process} changed {listed(probe.passes.changed_parameters)}."
    for layout in evidence.layouts:
        for step, recording in layout.trace.steps.items():
            if names := [*recording["outside"]]:
                yield f"{listed(names)} changed before the update of step {step} ({layout.name})."


@diagnosis(
    "parameters",
    "what a task does before or after an update depends on more than the step",
    "Compute it from what the lanes gather and add up. Draw from the default generators, which are seeded, "
    "and ask neither the time nor anything else that changes (docs/losses.md).",
)
def own_update_again(evidence: Evidence) -> Iterator[str]:
    """Find tensors of which a task's own code around an update makes something else when it runs again."""
    for layout in evidence.layouts:
        for step, recording in layout.trace.steps.items():
            for method, names in recording["otherwise"].items():
                again = f"{method} of step {step}, run again from the same state"
                yield f"{again}, gives a different {listed(names)} ({layout.name})."


@diagnosis(
    "options",
    "the learning rate or another option of the optimizer depends on the number of processes",
    "Set them for the global batch, which is the same on any number of processes: the scheduler, the "
    "optimizer and parameter_groups must not ask for the world size.",
)
def options_of_the_world_size(evidence: Evidence) -> Iterator[str]:
    """Find options of the optimizer that depend on the number of processes, as a scaled learning rate."""
    for layout in evidence.layouts[1:]:
        if difference := layout.differences.get("optimizer"):
            mine, theirs = difference.values
            yield f"{difference.place} is {mine} in one process and {theirs} in {layout.name}."


@diagnosis(
    "close",
    "gradients of equality close are farther apart than rounding explains",
    "Lanes with equal samples give different gradients. Use equality exact to see where.",
)
def beyond_the_bound(evidence: Evidence) -> Iterator[str]:
    """Find gradients of `close` that differ by more than rounding explains."""
    for layout in evidence.layouts[1:]:
        close = layout.close
        if close is not None and close.worst > 1 and not layout.differences:  # which would explain it
            yield f"{close.place} differs by {close.worst:.3g} times its bound in {layout.name}."
