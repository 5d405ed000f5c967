"""The table of runs."""

import io
import json
from pathlib import Path

from rich.console import Console

from lanewise.runs.report.runs import Runs
from lanewise.runs.report.status import RunStatus


def drawn(runs: Runs) -> str:
    file = io.StringIO()
    Console(file=file, width=80, highlight=False).print(runs.table())
    return file.getvalue()


def test_a_run_is_a_line_and_what_else_there_is_to_know():
    status = RunStatus(
        Path("runs/a"),
        "running",
        started=1.8e9,
        num_starts=2,
        step=1500,
        last_step=4000,
        seconds_left=3725,
        devices="2 x cpu",
        loss=0.25,
        evaluation={"held_out/loss": 0.5},
        best=("held_out/loss", 1000, 0.5),
    )
    ended = RunStatus(
        Path("runs/b"), "finished", devices="2 x cpu", reducer="ddp", seconds=75.4, samples_per_second=23366.6
    )
    assert list(Runs(Path("runs"), [ended]).lines()) == ["b: 2 x cpu, ddp; took 0:01:15; 23,366.6 samples/s"]
    runs = Runs(Path("runs"), [status])
    line = drawn(runs).splitlines()[1]
    for part in ("a ", "running", "1,500/4,000", "0.25", "held_out/loss 0.5"):
        assert part in line
    assert list(runs.lines()) == [
        "a: 2 x cpu; started 2 times; 1:02:05 left; best held_out/loss 0.5 after step 1,000"
    ]
    assert json.loads(json.dumps(runs.to_json()))["runs"][0]["step"] == 1500


def test_name_state_step_and_best_value_are_whole_in_80_columns():
    """Each was cut to make room for the last evaluation."""
    status = RunStatus(
        Path("runs/deep/an-experiment-with-a-name"),
        "stopped early",
        started=1.8e9,
        step=999,
        last_step=999,
        loss=0.25,
        evaluation={"held_out/loss": 0.5, "held_out/accuracy": 0.75},
        best=("held_out/loss", 100, 0.4375),
    )
    head, line = drawn(Runs(Path("runs"), [status])).splitlines()
    assert head.split() == ["run", "state", "step", "best"]
    assert line.split() == [
        "deep/an-experiment-with-a-name",
        "stopped",
        "early",
        "999/999",
        "held_out/loss",
        "0.4375",
    ]


def test_names_and_errors_of_strangers_are_text():
    hostile = "[bold]\x1b[31mred\n"
    status = RunStatus(
        Path("runs") / "x\x1b[2J[red]",
        "failed",
        error=hostile,
        devices=hostile,
        evaluation={hostile: 1.0},
        best=(hostile, 1, 1.0),
        next_command=hostile,
        problems=[hostile],
    )
    runs = Runs(Path("runs"), [status])
    shown = drawn(runs) + "\n".join(runs.lines())
    assert "\x1b" not in shown
    assert "[red]" in shown
    assert "[bold]" in shown
