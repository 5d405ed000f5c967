"""Ranks of one layout that hold different weights after a step."""

from lanewise.verify.diagnosis import Diagnosis, listed
from lanewise.verify.evidence import Evidence
from lanewise.verify.hidden import changed


def _find(evidence: Evidence) -> str | None:
    for layout in evidence.layouts:
        for rank, result in enumerate(layout.results):
            if result.trace is None or layout.trace is None:
                continue
            for mine, theirs in zip(layout.trace.steps, result.trace.steps, strict=True):
                if mine.weights != theirs.weights:
                    name = changed(mine.weights, theirs.weights)[0]
                    options = changed(mine.options, theirs.options)
                    return (
                        f"{name} differs between ranks 0 and {rank} of {layout.name} after step "
                        f"{mine.step}{', and so does ' + listed(options) if options else ''}."
                    )
    return None


DIAGNOSIS = Diagnosis(
    kind="unexplained",
    cause="ranks hold different weights",
    find=_find,
    remedy="Leave the weights to the optimizer, and let nothing of it depend on the rank.",
)
