"""Generators of random numbers that the model, the task or the optimizer has besides the default ones."""

from lanewise.verify.diagnosis import Diagnosis, also_changed, first_in
from lanewise.verify.evidence import Evidence
from lanewise.verify.hidden import generators


def _in_a_forward(evidence: Evidence) -> str | None:
    for seen, passes in evidence.unequal_passes():
        moved, divergence = generators(passes.changed), passes.divergence
        if moved or (divergence and divergence.call.has_generator):
            return f"{seen}{first_in(divergence)}{also_changed(moved)}."
    history = evidence.base.history
    if history is not None and history.found and generators(history.changed):
        return f"{history}{also_changed(generators(history.changed))}."
    return None


def _in_an_update(evidence: Evidence) -> str | None:
    updates = evidence.reference.updates
    if updates is None or not updates.parameter or not generators(updates.changed):
        return None
    return f"{updates}{also_changed(generators(updates.changed))}."


_CAUSE = "random numbers from a generator that lanewise does not seed"
_REMEDY = (
    "Draw from the default generators of torch, numpy and random: they are seeded for every lane of every "
    "step."
)

IN_A_FORWARD = Diagnosis(kind="forward", cause=_CAUSE, find=_in_a_forward, remedy=_REMEDY)
IN_AN_UPDATE = Diagnosis(kind="saved state", cause=_CAUSE, find=_in_an_update, remedy=_REMEDY)
