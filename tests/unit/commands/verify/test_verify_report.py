"""What the last lines of a report say: how the layouts compare, and nothing that was not seen."""

from dataclasses import replace

import pytest

from lanewise.commands.verify.diagnose import Finding
from lanewise.commands.verify.evidence import LayoutResult
from lanewise.commands.verify.job import RankResult
from lanewise.commands.verify.trace import Trace
from lanewise.commands.verify.verify_report import VerifyReport
from tests.distributed.tasks import Language, configure

NAMES = ("1 process", "1 again", "2 processes", "3 processes")
FINDING = Finding("a parameter is changed", "a forward changed first.weight.", "Leave it.")


def ran(loss: float = 1.0) -> Trace:
    return Trace({1: {"samples": {0: (1, 2)}, "loss": {0: (loss,)}}})


RAN = ran()


def report(traces=(RAN,) * 4, failures=("",) * 4, findings=(FINDING,), resumed=None) -> VerifyReport:
    layouts = [
        LayoutResult(name, [] if trace is None and failure else [RankResult(trace=trace or Trace())], failure)
        for name, trace, failure in zip(NAMES, traces, failures, strict=True)
    ]
    if resumed is not None:
        layouts[2].resumed = LayoutResult("2 processes, resumed", [RankResult(trace=resumed)])
        layouts[2].resumed.compare_with(layouts[0])
    for layout in layouts:
        layout.compare_with(layouts[0])
    return VerifyReport(configure(Language), layouts, findings, [])


def last(given: VerifyReport) -> str:
    return list(given.lines())[-1]


def test_what_compute_the_same_is_verified():
    said = last(report(findings=()))
    assert said.startswith("verified: 1 process, 2 processes and 3 processes compute the same bytes")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            report(traces=(None,) * 4),
            "1 cause found; training would refuse it, so no step was run",
        ),
        (
            report(traces=(ran(), ran(), None, None)),
            "1 cause found; training would refuse it, so no step of 2 processes and 3 processes was run",
        ),
        (
            report(
                traces=(ran(), ran(), ran(), None), failures=("", "", "", "it broke"), findings=(FINDING,) * 2
            ),
            "2 causes found; 3 processes failed",
        ),
        (
            report(traces=(ran(), ran(), ran(2.0), ran())),
            "1 cause found; 1 process, 2 processes and 3 processes do not compute the same",
        ),
        (
            report(resumed=ran(2.0)),
            "1 cause found; 1 process, 2 processes and 3 processes agree, a resumed run does not",
        ),
        (report(), "1 cause found, though 1 process, 2 processes and 3 processes agree in these steps"),
    ],
    ids=["refused", "refused elsewhere", "failed", "different", "different when resumed", "equal"],
)
def test_the_end_says_what_was_seen(given, said):
    assert last(given) == f"not verified: {said}"


def test_layouts_whose_steps_were_not_run_are_not_said_to_have_failed():
    table = report(traces=(ran(), ran(), None, None), failures=("", "", "", "it broke")).table()
    assert list(table.columns[1].cells) == ["same", "not run", "failed"]
    assert report(traces=(None,) * 4).heading().startswith("steps -; ")


@pytest.mark.parametrize("is_named", [True, False])
def test_an_error_that_ends_layouts_is_shown_once(is_named):
    error = (
        "parameter first.weight changed in the forward of lane 0 in step 2. Leave updates to the optimizer."
    )
    finding = replace(FINDING, evidence=f"2 processes: {error}") if is_named else FINDING
    given = report((ran(), ran(), None, None), ("", "", error, error), [finding])
    lines = "\n".join(given.lines())
    assert lines.count(error) == 1
    assert "agree" not in lines
