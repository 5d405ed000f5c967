"""State of the optimizer, the scheduler, the model or the task that a checkpoint does not hold."""

from lanewise.verify.diagnosis import Diagnosis, also_changed
from lanewise.verify.evidence import Evidence
from lanewise.verify.hidden import changed


def _in_an_update(evidence: Evidence) -> str | None:
    updates = evidence.reference.updates
    if updates is None or not updates.parameter:
        return None
    return f"{updates}{also_changed(updates.changed)}."


def _in_a_resumed_run(evidence: Evidence) -> str | None:
    trace = evidence.reference.trace
    for resumed in evidence.resumed():
        if resumed.differences:
            assert trace is not None
            assert resumed.trace is not None
            difference = next(iter(resumed.differences.values()))
            return (
                f"{resumed.name}, diverges from the uninterrupted run at {difference} "
                f"({difference.check}){also_changed(changed(trace.hidden, resumed.trace.hidden))}."
            )
    return None


_CAUSE = "state that a checkpoint does not hold"
_REMEDY = (
    "Keep it in a buffer, in the module's extra state (get_extra_state, set_extra_state) or in the "
    "optimizer's or scheduler's state_dict; or derive it from the step."
)

IN_AN_UPDATE = Diagnosis(kind="saved state", cause=_CAUSE, find=_in_an_update, remedy=_REMEDY)
IN_A_RESUMED_RUN = Diagnosis(kind="saved state", cause=_CAUSE, find=_in_a_resumed_run, remedy=_REMEDY)
