"""Micro-batches that are others when collate is called again with equal samples."""

from lanewise.verify.diagnoses.unsteady_sample import REMEDY
from lanewise.verify.diagnosis import Diagnosis, also_changed, listed
from lanewise.verify.evidence import Evidence


def _find(evidence: Evidence) -> str | None:
    for process, probe in evidence.probes():
        batch = probe.reads.batch
        for number, one in enumerate(batch, 1):
            if one != batch[0]:
                return (
                    f"collate, called {number} times in {process} with equal samples under the same random "
                    f"state, gives a different micro-batch{also_changed(probe.reads.changed)}."
                )
        if probe.reads.far:
            return (
                f"the first lane's micro-batch, read in {process} while {listed(probe.reads.far)} is far "
                "off, is another one."
            )
    return None


DIAGNOSIS = Diagnosis(
    kind="samples", cause="a micro-batch differs from read to read", find=_find, remedy=REMEDY
)
