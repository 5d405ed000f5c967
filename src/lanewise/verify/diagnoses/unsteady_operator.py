"""Operators that give other outputs for equal inputs."""

from lanewise.verify.diagnosis import Diagnosis
from lanewise.verify.evidence import Evidence


def _find(evidence: Evidence) -> str | None:
    for seen, passes in evidence.unequal_passes():
        divergence = passes.divergence
        if divergence and divergence.has_equal_inputs:
            return f"{seen}: {divergence.call} gave other outputs for equal inputs."
    return None


DIAGNOSIS = Diagnosis(
    kind="forward",
    cause="an operator is not deterministic",
    find=_find,
    remedy="Use a deterministic implementation of it.",
)
