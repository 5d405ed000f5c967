"""Forwards and losses that set the state of the default generators themselves."""

from lanewise.verify.diagnosis import Diagnosis
from lanewise.verify.evidence import Evidence


def _find(evidence: Evidence) -> str | None:
    for seen, passes in evidence.unequal_passes():
        divergence = passes.divergence
        if divergence and divergence.has_equal_inputs and not divergence.has_equal_random_state:
            return f"{seen}: before {divergence.call}, torch's default generators are in another state."
    return None


DIAGNOSIS = Diagnosis(
    kind="forward",
    cause="the random state is set by the task",
    find=_find,
    remedy="Leave the default generators alone in forward and loss (no torch.manual_seed): they are seeded "
    "for every lane of every step.",
)
