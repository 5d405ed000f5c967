"""Samples that stay what an earlier epoch made of them, as in a cache of augmented ones."""

from lanewise.verify.diagnosis import Diagnosis, also_changed
from lanewise.verify.evidence import Evidence


def _find(evidence: Evidence) -> str | None:
    base = evidence.base.reads
    # The repeat read the first half in the same order, and the second half as of epoch 1 first.
    other_order = set(list(base.later)[(len(base.later) + 1) // 2 :])
    for _, probe in evidence.again():
        differing = base.differing(probe.reads)
        if differing and set(differing) <= other_order:
            return (
                f"{differing[0]}, read as of epoch 1, differs if it was read as of epoch 0 "
                f"before{also_changed(probe.reads.changed)}."
            )
    return None


DIAGNOSIS = Diagnosis(
    kind="samples",
    cause="samples of an epoch depend on an earlier epoch",
    find=_find,
    remedy="Draw a sample's augmentation anew each time it is read: a cache must hold what comes before. "
    "Another number of processes, or a resumed run, reads a sample for the first time in another epoch.",
)
