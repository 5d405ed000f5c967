"""`lanewise bench` as a user runs it: the table, the bottleneck that was planted, and nothing left behind."""

import json
import os
import shutil
import signal
import tempfile
from pathlib import Path

import pytest

from tests.integration import ssh
from tests.integration.command import LANEWISE, ROOT, Cold, lanewise, wait_for, write_config

WITH_HOSTS = pytest.mark.skipif(ssh.WHY_NOT is not None, reason=str(ssh.WHY_NOT))
WITH_TC = pytest.mark.skipif(shutil.which("tc") is None, reason="not installed: tc (Debian: iproute2)")
BATCH = {"batch": {"global_batch_size": 32, "micro_batch_size": 8}}


def bench(config, tmp_path, *arguments, code=0):
    """Run in an empty folder, with temporary files in another one; return what was printed and written."""
    folders = [tmp_path / "here", Path(tempfile.mkdtemp(prefix="b"))]  # sockets need short names
    folders[0].mkdir()
    report = tmp_path / "report.json"
    options = ("--json", report, *arguments)
    done = lanewise("bench", config, *options, cwd=folders[0], variables={"TMPDIR": str(folders[1])})
    assert done.code == code, f"{done.code}\n{done.stdout}\n{done.stderr}"
    assert done.leftover == []
    assert [list(folder.iterdir()) for folder in folders] == [[], []]
    folders[1].rmdir()
    assert not (config.parent / "run").exists()
    return done, json.loads(report.read_text())


def of_grade(written, equality):
    return [row for row in written["rows"] if row["equality"] == equality and not row["is_ceiling"]]


def require_equal_trainings(written):
    """Every reducer was trained and evaluated, and made the same model."""
    trained = [row["trained"] for row in of_grade(written, "exact")]
    assert len({(row["num_steps"], row["model"], *row["values"].items()) for row in trained}) == 1


def require_sound(written):
    """Every reducer was measured on one and two devices, made the same model, and took what plan says.

    On a CPU nobody counts the memory of fsdp.
    """
    for equality in ("exact", "close"):
        assert [(row["reducer"], row["num_devices"]) for row in of_grade(written, equality)] == [
            ("single", 1),
            *((reducer, 2) for reducer in ("ddp", "fsdp", "data_parallel", "balanced_data_parallel")),
        ]
    assert [row["failure"] for row in written["rows"]] == [None] * 11
    assert len({row["model"] for row in of_grade(written, "exact")}) == 1
    for row in of_grade(written, "exact") + of_grade(written, "close"):
        expected = None if row["reducer"] == "fsdp" else pytest.approx(row["planned_bytes"], rel=0.1)
        assert row["fullest_bytes"] == expected
        assert sum(row["phases"].values()) == pytest.approx(1)
        assert row["num_rounds"] >= 5


@pytest.mark.slow
def test_every_reducer_is_measured_with_the_same_model_and_the_memory_that_was_planned(tmp_path):
    config = write_config(tmp_path, "bottlenecks.Layers", {"width": 512}, **BATCH)
    done, written = bench(config, tmp_path, "--seconds", "1")
    require_sound(written)
    assert "model: the digest after 4 steps in exact, equal in all rows" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("what bounds ")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mnist", "char_gpt", "session_rec"])
def test_the_examples(tmp_path, name):
    _, written = bench(
        ROOT / "examples" / name / f"{name}.yaml",
        tmp_path,
        *("--seconds", "1", "--evaluate", "3", "--distributed.equality", "exact"),
    )
    require_sound(written)
    require_equal_trainings(written)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "bound"),
    [
        ("bottlenecks.ManyPasses", "compute"),
        ("bottlenecks.ManyWeights", "the optimizer"),
    ],
)
def test_compute_and_the_optimizer_are_named(tmp_path, task, bound):
    adam = {"class_path": "torch.optim.Adam"}
    batch = {"global_batch_size": 8, "micro_batch_size": 8}
    config = write_config(tmp_path, task, batch=batch, optimizer=adam)
    _, written = bench(config, tmp_path, "--devices", "1", "--seconds", "1")
    assert written["bound"].startswith(f"single on 1 device, exact: {bound}: ")


@pytest.mark.slow  # unit/commands/bench shows the row
def test_a_mode_that_fails_is_a_row_with_its_reason(tmp_path):
    config = write_config(tmp_path, "bottlenecks.FailsOnRankOne", **BATCH)
    options = ("--reducers", "single,ddp", "--seconds", "0.2", "--evaluate", "3")
    done, written = bench(config, tmp_path, *options)
    failures = {row["reducer"]: row["failure"] for row in of_grade(written, "exact")}
    assert failures["single"] is None
    assert "this is what failed" in failures["ddp"]
    assert done.stdout.count("RuntimeError: this is what failed") == 1
    assert "after 3 steps and an evaluation, in exact" in done.stdout
    assert [row["num_steps"] for row in (row["trained"] for row in written["rows"]) if row] == [3]


@pytest.mark.slow
def test_nothing_to_measure_is_an_exit_code(tmp_path):
    config = write_config(tmp_path, "bottlenecks.FailsOnRankOne", **BATCH)
    done, _ = bench(config, tmp_path, "--reducers", "ddp", "--devices", "2", "--seconds", "1", code=1)
    assert "this is what failed" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_prints_what_was_measured(tmp_path, sign):
    config = write_config(tmp_path, "bottlenecks.Layers", **BATCH)
    log = tmp_path / "log"
    options = ("--reducers", "single", "--seconds", "600")
    with log.open("w") as stderr, Cold(*LANEWISE, "bench", config, *options, stderr=stderr) as command:
        wait_for(lambda: "round 2" in log.read_text())
        os.killpg(command.pid, sign)
        done = command.finish()
    assert done.code == 130
    assert "interrupted: this is what was measured until then" in done.stdout
    assert "what bounds single on 1 device, exact: " in done.stdout
    assert done.leftover == []
