"""Forwards and backwards that are collectives, as that of SyncBatchNorm."""

from lanewise.verify.diagnosis import Diagnosis
from lanewise.verify.evidence import Evidence


def _find(evidence: Evidence) -> str | None:
    for process, probe in evidence.probes():
        if probe.passes.collectives:
            return f"it communicates with other processes by {probe.passes.collectives[0]} (on {process})."
    return None


DIAGNOSIS = Diagnosis(
    kind="forward",
    cause="the forward depends on the layout",
    find=_find,
    remedy="A lane must not see what other lanes compute, as SyncBatchNorm does: use BatchNorm, whose "
    "statistics are each lane's own and are merged after the step, or GroupNorm.",
)
