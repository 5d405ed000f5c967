"""Parameters that something other than the optimizer changes."""

from lanewise.verify.diagnosis import Diagnosis, listed
from lanewise.verify.evidence import Evidence


def _find(evidence: Evidence) -> str | None:
    for process, probe in evidence.probes():
        if probe.passes.changed_parameters:
            return f"a forward and backward in {process} changed {listed(probe.passes.changed_parameters)}."
    for layout in evidence.layouts:
        for step in layout.trace.steps if layout.trace else ():
            if step.changed_outside:
                return (
                    f"{listed(step.changed_outside)} changed before the update of step {step.step} "
                    f"({layout.name})."
                )
    return None


DIAGNOSIS = Diagnosis(
    kind="parameters",
    cause="a parameter is changed outside of the optimizer",
    find=_find,
    remedy="Leave the weights to the optimizer. What a forward maintains (a moving average, a projection) "
    "differs between processes: make it a buffer, or a parametrization.",
)
