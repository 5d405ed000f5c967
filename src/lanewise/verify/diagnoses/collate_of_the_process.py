"""A collate that depends on the process, as one that iterates over a set of texts."""

from lanewise.verify.diagnosis import Diagnosis
from lanewise.verify.evidence import Evidence


def _find(evidence: Evidence) -> str | None:
    base = evidence.base.reads
    for process, probe in (*evidence.again(), *evidence.elsewhere()):
        if not base.differing(probe.reads) and probe.reads.batch[0] != base.batch[0]:
            return f"equal samples give a different micro-batch in {process} than in one process."
    return None


DIAGNOSIS = Diagnosis(
    kind="samples",
    cause="collate depends on the process",
    find=_find,
    remedy="Let collate depend on the samples and the default generators alone. A set of texts has another "
    "order in each process: sort it.",
)
