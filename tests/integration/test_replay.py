"""`lanewise replay` as a user sees it: what it says, writes and exits with."""

import json
import sys
from pathlib import Path

import pytest
import torch

import lanewise as package
from tests.generators import unmoved_generators
from tests.integration.command import lanewise, train, write_config
from tests.integration.tasks import Line
from tests.slow import slow


@pytest.fixture(autouse=True)
def in_project(monkeypatch):
    """The working directory has the code of the runs, which need no trust then."""
    monkeypatch.chdir(Path(__file__).parent)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """Six steps on two processes with an audit, digests after each, and a checkpoint after every second."""
    folder = tmp_path_factory.mktemp("replay")
    config = write_config(folder, checkpoint={"every": {"steps": 2}, "keep_last": 9})
    given = ("--integrity.digest_every_steps", 1, "--distributed.devices", 2, "--audit")
    train(config, *given).require_success()
    return folder / "run"


@pytest.mark.parametrize("devices", [1, *slow(2)])
def test_a_step_is_as_the_run_wrote_it(run_dir, tmp_path, devices):
    file = tmp_path / "step.json"
    given = ("--step", 4, "--json", file, "--distributed.devices", devices)
    done = lanewise("replay", run_dir, *given).require_success()
    assert done.stdout.startswith(f"step 4 of {run_dir}: 2 steps from the checkpoint after step 2\n")
    assert "step 4: as the run wrote it" in done.stdout
    written = json.loads(file.read_text())
    parts = written["comparison"]["parts"]
    assert {"digests", "metrics", "samples", "inputs"} <= parts.keys()  # those of the lanes by the audit
    assert all(part["first_unequal"] is None for part in parts.values())
    replayed = written["replayed"]
    assert replayed["weights"]
    for name, digest in replayed["weights"].items():  # the same as verify has
        assert replayed["digests"][f"model/{name}"] == digest


def test_a_lane_is_shown_with_its_samples(run_dir):
    done = lanewise("replay", run_dir, "--step", 3, "--lane", 1, "--json", "-")
    found = json.loads(done.require_success().stdout)
    assert [sample for sample, _ in found["alone"]] == found["samples"]
    assert "inputs" in found["comparison"]["parts"]


def copied(run_dir, other):
    """A run of which no checkpoint is left."""
    other.mkdir()
    for name in ("config.yaml", "run.jsonl", "metrics.jsonl"):
        (other / name).write_text((run_dir / name).read_text())
    return other


def test_other_versions_are_named_and_allowed(run_dir, tmp_path):
    other = copied(run_dir, tmp_path / "run")
    record = (other / "run.jsonl").read_text()
    (other / "run.jsonl").write_text(record.replace(f'"torch": "{torch.__version__}"', '"torch": "1.0"'))
    done = lanewise("replay", other, "--step", 1)
    assert done.code == 2
    said = done.stderr.replace("\n", " ")
    assert f"equal bytes of {other} depend on what differs: torch was 1.0, and is {torch.__version__}" in said
    assert (
        f"lanewise replay {other} --step 1 --allow exact" in said
    )  # diff, which says it too, has no --allow
    lanewise("replay", other, "--step", 1, "--allow", "exact").require_success()


def test_other_data_is_named_also_where_no_checkpoint_tells(run_dir, tmp_path):
    """A replay from the seed read whatever samples were there now, and showed their loss as the run's."""
    other = copied(run_dir, tmp_path / "run")
    record = (other / "run.jsonl").read_text()
    (other / "run.jsonl").write_text(record.replace('"num_samples": ', '"num_samples": 9'))
    done = lanewise("replay", other, "--step", 1, "--lane", 0)
    assert done.code == 2
    assert f"{other} read other data, {{'num_samples': 9" in done.stderr.replace("\n", " ")


def test_what_differs_exits_with_1(run_dir, tmp_path):
    other = copied(run_dir, tmp_path / "run")
    text = (other / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    of_step = next(line for line in lines if line.get("event") == "digests" and line["step"] == 2)
    name = next(iter(of_step["digests"]))
    of_step["digests"][name] = "0" * 16
    (other / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    done = lanewise("replay", other, "--random", 9)
    assert done.code == 1
    assert f"  {name}: " in done.stdout
    assert "of the run's 6 (100.0%)" in done.stdout
    assert not (other / "checkpoints").exists()


def test_an_audit_counts_no_step_whose_update_nothing_shows(run_dir, tmp_path):
    """The line of the last step that was drawn is of the weights before its update."""
    other = copied(run_dir, tmp_path / "run")
    lines = (other / "metrics.jsonl").read_text().splitlines(keepends=True)
    (other / "metrics.jsonl").write_text("".join(line for line in lines if "digests" not in line))
    done = lanewise("replay", other, "--random", 9).require_success()
    assert "of the run's 6 (83.3%)" in done.stdout
    assert done.stdout.splitlines()[-1] == "not compared, as only one has it: digests"


@pytest.mark.parametrize("change", [0.0, 1.0])
def test_a_lane_is_compared_with_what_the_run_wrote_of_the_largest_loss(run_dir, tmp_path, change):
    """Of another lane of the step it wrote nothing, so that nothing is judged."""
    other = copied(run_dir, tmp_path / "run")
    lines = [json.loads(line) for line in (other / "metrics.jsonl").read_text().splitlines()]
    largest = next(line["largest_loss"] for line in lines if "largest_loss" in line)
    largest["loss"] += change
    (other / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    step, lane = largest["step"], largest["lane"]
    assert lanewise("replay", other, "--step", step, "--lane", lane).code == (1 if change else 0)
    if change:
        return
    done = lanewise("replay", other, "--step", step, "--lane", 1 - min(lane, 1))
    assert done.code == 2
    assert "the run wrote nothing of it (--audit)" in done.stdout


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--step", 7), "has 6 steps: got step 7"),
        ((), "replay takes --step N"),
        (("--step", 3, "--lane", -1), "--lane must be a number from 0 on: got '-1'"),
        *slow(
            (("--step", 3, "--lane", 4), "lane 4 has no samples in step 3"), (("--lane", 4), "takes --step N")
        ),
    ],
)
def test_what_cannot_be_taken_again_exits_with_2(run_dir, given, message):
    done = lanewise("replay", run_dir, *given)
    assert done.code == 2
    assert message in done.stderr


def test_a_lane_is_given_to_a_script(run_dir, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    with unmoved_generators():
        model, batch, outputs, gradients = package.replay(run_dir, 3, 1)
    assert model.training
    assert len(outputs) == len(batch[0])
    assert gradients.keys() == dict(model.named_parameters()).keys()


class Held(Line):
    """Has an argument that no configuration can hold."""

    def __init__(self, held: object) -> None:
        super().__init__()
        self.held = held


def test_steps_of_a_task_that_was_given_as_an_object_are_taken_again_and_audited(tmp_path):
    """The command cannot build it."""
    sections = {
        "batch": {"global_batch_size": 8, "micro_batch_size": 4},
        "train": {"max_steps": 3, "run_dir": str(tmp_path / "run")},
        "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}},
        "log": {"every_steps": 1},
        "distributed": {"equality": "exact", "device_type": "cpu"},
    }
    task = Held(object())
    package.train(task, **sections)
    done = lanewise("replay", tmp_path / "run", "--step", 2)
    assert done.code == 2
    assert "held was an object of builtins.object" in done.stderr.replace("\n", " ")
    found = package.replay(tmp_path / "run", 2, task=task)
    assert (found.code, [*found.replayed["loss"]]) == (0, [0, 1])
    assert "step 2: as the run wrote it" in str(found)
    audited = package.replay(tmp_path / "run", random=2, seed=1, task=task)
    assert (audited.code, len(audited.compared)) == (0, 2)
