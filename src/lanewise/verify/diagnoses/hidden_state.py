"""State that the model or the task keeps in attributes: lanes see what other lanes left there."""

from lanewise.verify.diagnosis import Diagnosis, also_changed, first_in, listed
from lanewise.verify.evidence import Evidence


def _between_passes(evidence: Evidence) -> str | None:
    for seen, passes in evidence.unequal_passes():
        if passes.changed:
            return f"{seen}{first_in(passes.divergence)}{also_changed(passes.changed)}."
    return None


def _after_others(evidence: Evidence) -> str | None:
    history = evidence.base.history
    return f"{history}{also_changed(history.changed)}." if history is not None and history.found else None


def _of_the_first(evidence: Evidence) -> str | None:
    base = evidence.base
    for process, probe in evidence.again():
        is_given_the_same = (probe.weights, probe.reads.batch) == (base.weights, base.reads.batch)
        if is_given_the_same and probe.first and probe.passes.results[0] != base.passes.results[0]:
            return (
                f"the first lane's micro-batch gives another loss or gradient in {process}, where another "
                f"one was the first to be computed{also_changed(probe.first)}."
            )
    return None


def _in_steps(evidence: Evidence) -> str | None:
    """Find what the steps changed, where equal steps part on several processes and nothing else says why."""
    of_one = evidence.reference.trace
    for layout in evidence.layouts[2:]:
        if not layout.differences or of_one is None or layout.trace is None:
            continue
        names = sorted({*of_one.changed, *layout.trace.changed})
        if names:
            check, difference = next(iter(layout.differences.items()))
            return (
                f"{layout.name} and one process first differ in {check}, at {difference}: "
                f"{difference.values[0]} in one process, {difference.values[1]} there; only this is kept "
                f"from lane to lane: {listed(names)}."
            )
    return None


_CAUSE = "state outside of parameters and buffers"
_REMEDY = (
    "Make it a buffer (register_buffer): buffers start each lane with the same value, are merged over the "
    "lanes, and are in checkpoints."
)

BETWEEN_PASSES = Diagnosis(kind="forward", cause=_CAUSE, find=_between_passes, remedy=_REMEDY)
OF_THE_FIRST = Diagnosis(kind="forward", cause=_CAUSE, find=_of_the_first, remedy=_REMEDY)
AFTER_OTHERS = Diagnosis(kind="forward", cause=_CAUSE, find=_after_others, remedy=_REMEDY)
IN_STEPS = Diagnosis(kind="unexplained", cause=_CAUSE, find=_in_steps, remedy=_REMEDY)
