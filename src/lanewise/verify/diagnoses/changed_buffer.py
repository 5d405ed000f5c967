"""Buffers that an evaluation changes, by which its later micro-batches are others."""

from lanewise.verify.diagnosis import Diagnosis, also_changed
from lanewise.verify.evidence import Evidence


def _find(evidence: Evidence) -> str | None:
    history = evidence.base.history
    if history is None or not history.buffers:
        return None
    return (
        "the first lane's micro-batch, evaluated after another one, gives a different "
        f"loss{also_changed(history.buffers)}."
    )


DIAGNOSIS = Diagnosis(
    kind="forward",
    cause="an evaluation changes a buffer",
    find=_find,
    remedy="Change it in training alone (if self.training), and not in place where it ought to be constant: "
    "in an evaluation each process sees other micro-batches, and nothing merges what they make of it.",
)
