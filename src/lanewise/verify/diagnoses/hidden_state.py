"""State that the model or the task keeps in attributes: lanes see what other lanes left there."""

from lanewise.verify.diagnosis import Diagnosis, also_changed, first_in
from lanewise.verify.evidence import Evidence
from lanewise.verify.hidden import changed


def _between_passes(evidence: Evidence) -> str | None:
    for seen, passes in evidence.unequal_passes():
        if passes.changed:
            return f"{seen}{first_in(passes.divergence)}{also_changed(passes.changed)}."
    return None


def _after_others(evidence: Evidence) -> str | None:
    history = evidence.base.history
    return f"{history}{also_changed(history.changed)}." if history is not None and history.found else None


def _in_an_evaluation(evidence: Evidence) -> str | None:
    trace = evidence.reference.trace
    for layout in evidence.parted():
        if trace is not None and layout.trace is not None and set(layout.differences) == {"evaluation"}:
            difference = layout.differences["evaluation"]
            names = changed(trace.hidden, layout.trace.hidden)
            if names:
                return (
                    f"{difference.place} is {difference.values[0]} in one process and "
                    f"{difference.values[1]} in {layout.name}, with equal weights{also_changed(names)}."
                )
    return None


_CAUSE = "state outside of parameters and buffers"
_REMEDY = (
    "Make it a buffer (register_buffer): buffers start each lane with the same value, are merged over the "
    "lanes, and are in checkpoints."
)

BETWEEN_PASSES = Diagnosis(kind="forward", cause=_CAUSE, find=_between_passes, remedy=_REMEDY)
AFTER_OTHERS = Diagnosis(kind="forward", cause=_CAUSE, find=_after_others, remedy=_REMEDY)
IN_AN_EVALUATION = Diagnosis(kind="unexplained", cause=_CAUSE, find=_in_an_evaluation, remedy=_REMEDY)
