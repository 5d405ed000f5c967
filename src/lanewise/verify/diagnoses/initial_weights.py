"""Models that are built with other weights in other processes."""

from collections.abc import Iterator

from lanewise.verify.diagnosis import Diagnosis
from lanewise.verify.evidence import Evidence
from lanewise.verify.hidden import changed
from lanewise.verify.probe import Probe


def _of_the_process(evidence: Evidence) -> str | None:
    return _compare(evidence, evidence.again())


def _of_the_rank(evidence: Evidence) -> str | None:
    return _compare(evidence, evidence.elsewhere())


def _compare(evidence: Evidence, others: Iterator[tuple[str, Probe]]) -> str | None:
    for process, probe in others:
        if probe.weights != evidence.base.weights:
            name = changed(evidence.base.weights, probe.weights)[0]
            return f"build_model gives a different {name} in {process} than in the first process."
    return None


_REMEDY = "Let build_model draw from the default generators alone, seeded alike on every rank."

OF_THE_PROCESS = Diagnosis(
    kind="initial weights",
    cause="the initial weights depend on the process or the time",
    find=_of_the_process,
    remedy=_REMEDY,
)
OF_THE_RANK = Diagnosis(
    kind="initial weights",
    cause="the initial weights depend on the rank or the number of processes",
    find=_of_the_rank,
    remedy=_REMEDY,
)
