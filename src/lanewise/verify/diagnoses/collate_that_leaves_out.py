"""A collate that drops samples for their place in the micro-batch."""

from lanewise.verify.diagnosis import Diagnosis, listed
from lanewise.verify.evidence import Evidence


def _find(evidence: Evidence) -> str | None:
    reads = evidence.base.reads
    if not reads.left_out or reads.is_by_content:
        return None
    return (
        f"the first lane's micro-batch is the same without {listed(reads.left_out)}; in another order it is "
        "the same without others."
    )


DIAGNOSIS = Diagnosis(
    kind="micro-batch",
    cause="collate leaves samples out",
    find=_find,
    remedy="Let collate keep every sample that it is given: what it leaves out is trained in no epoch, or in "
    "one by chance.",
)
