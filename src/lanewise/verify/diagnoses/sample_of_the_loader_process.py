"""Samples that depend on the DataLoader worker that reads them."""

from lanewise.verify.diagnoses.unsteady_sample import REMEDY
from lanewise.verify.diagnosis import Diagnosis
from lanewise.verify.evidence import Evidence


def _find(evidence: Evidence) -> str | None:
    for process, probe in evidence.probes():
        if probe.reads.batch_of_worker not in (None, probe.reads.batch[0]):
            return (
                f"the first lane's micro-batch differs between {process} and a DataLoader worker of that "
                "process."
            )
    return None


DIAGNOSIS = Diagnosis(
    kind="samples", cause="a sample depends on the loader's process", find=_find, remedy=REMEDY
)
