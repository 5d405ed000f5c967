"""Forwards and losses that depend on the process that computes them."""

from collections.abc import Iterator

from lanewise.verify.diagnosis import Diagnosis, first_in
from lanewise.verify.evidence import Evidence
from lanewise.verify.operators import first_divergence
from lanewise.verify.probe import Probe


def _of_the_process(evidence: Evidence) -> str | None:
    return _compare(evidence, evidence.again())


def _of_the_rank(evidence: Evidence) -> str | None:
    return _compare(evidence, evidence.elsewhere())


def _compare(evidence: Evidence, others: Iterator[tuple[str, Probe]]) -> str | None:
    base = evidence.base
    for process, probe in others:
        given = (probe.weights, probe.reads.batch)
        if given == (base.weights, base.reads.batch) and probe.passes.results[0] != base.passes.results[0]:
            divergence = first_divergence(base.passes.calls[0], probe.passes.calls[0])
            return (
                "the same micro-batch, with equal weights and random state, gives a different loss or "
                f"gradient in {process} than in the first process{first_in(divergence)}."
            )
    return None


_REMEDY = (
    "Let nothing but the batch, the weights and the default generators enter forward and loss: no rank, no "
    "number of processes (lanewise divides by the weight of the global batch), no time."
)

OF_THE_PROCESS = Diagnosis(
    kind="forward",
    cause="the forward or the loss depends on the process or the time",
    find=_of_the_process,
    remedy=_REMEDY,
)
OF_THE_RANK = Diagnosis(
    kind="forward",
    cause="the forward or the loss depends on the rank or the number of processes",
    find=_of_the_rank,
    remedy=_REMEDY,
)
