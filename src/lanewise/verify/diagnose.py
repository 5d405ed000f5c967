"""From what the layouts found to the causes."""

from lanewise.verify.diagnoses import DIAGNOSES
from lanewise.verify.diagnosis import Finding
from lanewise.verify.evidence import Evidence


def diagnose(evidence: Evidence) -> list[Finding]:
    """Name the causes of what differs: for each kind the first one that is found."""
    findings: list[Finding] = []
    kinds = set()
    for diagnosis in DIAGNOSES:
        if diagnosis.kind in kinds or (diagnosis.kind == "unexplained" and findings):
            continue
        found = diagnosis.find(evidence)
        if found is not None:
            findings.append(Finding(diagnosis.cause, found, diagnosis.remedy))
            kinds.add(diagnosis.kind)
    return findings
