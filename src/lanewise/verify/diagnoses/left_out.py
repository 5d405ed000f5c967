"""Parts of a configuration by which results depend on the layout."""

from lanewise.verify.diagnosis import Diagnosis
from lanewise.verify.evidence import Evidence


def _find(evidence: Evidence) -> str | None:
    if not evidence.left_out:
        return None
    return f"it was left out of what was run: {' and '.join(evidence.left_out)}."


DIAGNOSIS = Diagnosis(
    kind="configuration",
    cause="the configuration asks for results that depend on the layout",
    find=_find,
    remedy="Leave it out where any number of devices must compute the same.",
)
