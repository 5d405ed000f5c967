"""Options of the optimizer that depend on the number of processes, as a scaled learning rate."""

from lanewise.verify.diagnosis import Diagnosis
from lanewise.verify.evidence import Evidence


def _find(evidence: Evidence) -> str | None:
    for layout in evidence.parted():
        difference = layout.differences.get("options")
        if difference is not None:
            mine, theirs = difference.values
            return f"{difference.place} is {mine} in one process and {theirs} in {layout.name}."
    return None


DIAGNOSIS = Diagnosis(
    kind="options",
    cause="the learning rate or another option of the optimizer depends on the number of processes",
    find=_find,
    remedy="Set them for the global batch, which is the same on any number of processes: the scheduler, the "
    "optimizer and parameter_groups must not ask for the world size.",
)
