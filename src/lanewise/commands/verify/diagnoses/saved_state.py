"""State of the optimizer, the scheduler, the model or the task that a checkpoint does not hold."""

from collections.abc import Iterator

from lanewise.commands.verify.diagnoses.forward import UNSEEDED
from lanewise.commands.verify.evidence import Evidence, also_changed, diagnosis, listed
from lanewise.commands.verify.hidden import generators
from lanewise.engine.reachable import SEED_THEM

_NOT_SAVED = "state that a checkpoint does not hold"
_SAVE_IT = (
    "Keep it in a buffer, in the module's extra state (get_extra_state, set_extra_state) or in the "
    "optimizer's or scheduler's state_dict; or derive it from the step."
)


@diagnosis("saved state", UNSEEDED, SEED_THEM)
def generator_of_the_optimizer(evidence: Evidence) -> Iterator[str]:
    """Find updates that draw from a generator of the optimizer's own."""
    updates = evidence.reference.updates
    if updates.parameter and generators(updates.changed):
        yield f"{updates}{also_changed(generators(updates.changed))}."


@diagnosis("saved state", _NOT_SAVED, _SAVE_IT)
def state_of_the_optimizer(evidence: Evidence) -> Iterator[str]:
    """Find updates that depend on what is not in the optimizer's state dict."""
    updates = evidence.reference.updates
    if updates.parameter:
        yield f"{updates}{also_changed(updates.changed)}."


@diagnosis("resumed", "a run cannot resume from a checkpoint", "See what the error says.")
def failed_resume(evidence: Evidence) -> Iterator[str]:
    """Find runs that fail when they go on."""
    return (f"{resumed.name}: {resumed.failure}" for resumed in evidence.resumed() if resumed.failure)


@diagnosis("resumed", _NOT_SAVED, _SAVE_IT)
def state_of_the_run(evidence: Evidence) -> Iterator[str]:
    """Find runs that go on otherwise than without a stop."""
    for resumed in evidence.resumed():
        for check, difference in resumed.differences.items():
            lost = f"; the checkpoint did not bring back {listed(resumed.not_restored)}"
            also = lost if resumed.not_restored else also_changed(resumed.hidden_differences)
            yield f"{resumed.name}, diverges from the uninterrupted run at {difference} ({check}){also}."
