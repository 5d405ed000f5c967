"""Going on with a run from its checkpoints: what it leaves is what a run that was never stopped leaves."""

import json
import os
import shutil
import signal
import socket
from hashlib import sha256
from random import Random

import pytest

from tests.integration.command import ROOT, TORCHRUN, Warm, lanewise, run, train, wait_for, write_config
from tests.slow import slow
from tests.soak.kill_and_resume import KINDS, check_lineage, kill_and_resume, result, write_noisy


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run that was never stopped."""
    folder = tmp_path_factory.mktemp("whole")
    train(write_noisy(folder)).require_success()
    return folder


@pytest.fixture(scope="module")
def stopped_once(tmp_path_factory):
    """The folder of a run that max_steps stopped after 7 of 12 steps; it has checkpoints of 6 and 7."""
    folder = tmp_path_factory.mktemp("stopped")
    train(write_noisy(folder, num_steps=7)).require_success()
    return folder


@pytest.fixture
def stopped(stopped_once, tmp_path):
    """A copy of that run, and its configuration, with all 12 steps."""
    shutil.copytree(stopped_once / "run", tmp_path / "run")
    return write_noisy(tmp_path)


def test_a_run_in_parts_on_1_2_3_and_1_devices_ends_like_one_that_was_never_stopped(tmp_path, whole):
    folder = tmp_path / "trained"
    folder.mkdir()
    config = write_noisy(tmp_path)
    parts = [(2, 1, 0), (5, 2, 1), (9, 3, 2), (12, 1, 0)]
    for attempt, (num_steps, devices, num_workers) in enumerate(parts):
        done = train(
            config,
            *["--resume"] * (attempt > 0),
            *("--train.max_steps", num_steps, "--distributed.devices", devices),
            *("--data.num_workers", num_workers, "--task.init_args.folder", folder),
            variables={"ATTEMPT": str(attempt)},
        ).require_success()
        if attempt:
            before = parts[attempt - 1][0]
            assert f"step-{before:06d}: {before} of {num_steps} steps were taken" in done.stderr
    assert result(tmp_path) == result(whole)
    check_lineage(folder, 12)


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "every_steps"), [(1, 1), (2, 3), (3, 1)])
def test_a_run_that_is_killed_again_and_again_ends_like_one_that_never_was(
    tmp_path, whole, seed, every_steps
):
    random = Random(seed)
    kinds = random.sample(KINDS, 3)
    kill_and_resume(write_noisy(tmp_path, every_steps=every_steps), random, kinds, print, 12, Warm)
    assert result(tmp_path) == result(whole)


def test_a_run_dir_that_holds_a_run_needs_resume_or_another_run_dir(stopped):
    before = result(stopped.parent)
    done = train(stopped)
    assert done.code == 2
    assert len(done.errors) == 1
    assert "--resume" in done.errors[0]
    assert "choose another train.run_dir" in done.errors[0]
    assert result(stopped.parent) == before


def test_resume_in_an_empty_run_dir_starts_and_names_the_runs_near_it(tmp_path, whole):
    """A mistyped name, of the run or of the folder around it, began anew after one line that nobody reads."""
    near, folder = [tmp_path / "runs" / "rum", tmp_path / "run" / "other"], tmp_path / "runs"
    for run_dir in near:
        shutil.copytree(whole / "run", run_dir)
    done = train(write_noisy(folder), "--resume").require_success()
    said = done.stderr.replace("\n", " ")
    assert "starting from the beginning. Near it there are checkpoints in " in said
    assert ", ".join(map(str, near)) in said
    assert result(folder) == result(whole)


@pytest.mark.slow
def test_a_run_that_is_killed_between_two_lines_of_metrics_writes_the_same_lines(tmp_path):
    """Checkpoints are after 3, 6 and 9 steps, lines after 1, 5, 10 and 12."""
    folders = [tmp_path / name for name in ("whole", "killed")]
    whole, killed = (write_noisy(folder, log={"every_steps": 5}) for folder in folders)
    train(whole).require_success()
    kill_and_resume(killed, Random(4), ["worker"], print, 12, Warm)
    assert [step for _, step, _ in result(folders[0])[1]] == [1, 5, 10, 12]
    assert result(folders[1]) == result(folders[0])


@pytest.mark.parametrize("devices", [1, *slow(2)])
def test_resume_of_a_run_that_has_ended_ends_with_the_same_bytes(tmp_path, whole, devices):
    shutil.copytree(whole / "run", tmp_path / "run")
    (tmp_path / "run" / "model.safetensors").unlink()
    train(write_noisy(tmp_path), "--resume", "--distributed.devices", devices).require_success()
    assert result(tmp_path) == result(whole)


@pytest.mark.parametrize("devices", [1, *slow(2)])
def test_a_run_that_early_stopping_ended_has_ended(tmp_path, devices):
    early_stopping = {"metric": "all/loss", "mode": "min", "patience": 1, "min_delta": 1000}
    config = write_config(
        tmp_path,
        "tasks.Evaluated",
        evaluate={"every_steps": 2, "early_stopping": early_stopping},
        distributed={"devices": devices},
    )
    done = train(config).require_success()
    assert "the run ends after 4 of 6 steps (early stopping: " in done.stderr
    model = (tmp_path / "run" / "model.safetensors").read_bytes()
    done = train(config, "--resume").require_success()
    assert "nothing was left to train: all 4 steps were taken before" in done.stderr
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == model


def test_resume_with_fewer_steps_than_were_taken_changes_nothing_that_was_trained(tmp_path, whole):
    shutil.copytree(whole / "run", tmp_path / "run")
    done = train(write_noisy(tmp_path, num_steps=5), "--resume")
    assert done.code == 2
    assert "and this one has 5. Raise train.max_steps" in done.stderr
    assert result(tmp_path) == result(whole)


def damage(folder):
    """Cut the last byte off the largest file."""
    path = max(folder.iterdir(), key=lambda path: path.stat().st_size)
    path.write_bytes(path.read_bytes()[:-1])
    return path


@pytest.mark.parametrize("devices", [*slow(1), 2])
def test_resume_falls_back_from_a_damaged_checkpoint_to_the_one_before(stopped, whole, devices):
    path = damage(stopped.parent / "run" / "checkpoints" / "step-000007")
    done = train(stopped, "--resume", "--distributed.devices", devices).require_success()
    assert result(stopped.parent) == result(whole)
    skipped = [line for line in done.stderr.splitlines() if line.startswith("skipping a checkpoint: ")]
    assert len(skipped) == 1
    assert str(path) in skipped[0]
    assert "step-000006: 6 of 12 steps were taken" in done.stderr


def test_a_damaged_checkpoint_of_a_later_step_does_not_count_among_those_that_are_kept(stopped):
    checkpoints = stopped.parent / "run" / "checkpoints"
    damage((checkpoints / "step-000007").rename(checkpoints / "step-000011"))
    options = ("--checkpoint.keep_last", 1, "--checkpoint.every.steps", 1, "--train.max_steps", 9)
    train(stopped, "--resume", *options).require_success()
    assert "step-000009" in [path.name for path in checkpoints.iterdir()]


@pytest.mark.parametrize("devices", [*slow(1), 2])
def test_resume_from_damaged_checkpoints_only_is_one_error_and_deletes_nothing(stopped, devices):
    checkpoints = stopped.parent / "run" / "checkpoints"
    for folder in checkpoints.iterdir():
        damage(folder)
    before = {path: path.read_bytes() for path in checkpoints.rglob("*") if path.is_file()}
    metrics = result(stopped.parent)
    done = train(stopped, "--resume", "--distributed.devices", devices)
    assert done.code == 2
    assert len(done.errors) == 1
    assert "none of the 2 checkpoints in" in done.errors[0]
    assert "Traceback" not in done.stderr
    assert {path: path.read_bytes() for path in checkpoints.rglob("*") if path.is_file()} == before
    assert result(stopped.parent) == metrics


OTHER = ("--train.seed", 1, "--task.init_args.num_samples", 32, "--batch.micro_batch_size", 4)


@pytest.mark.parametrize("devices", [*slow(1), 2])
def test_another_seed_dataset_and_lanes_are_one_error_that_lists_them_and_says_how_to_go_on(stopped, devices):
    before = result(stopped.parent)
    done = train(stopped, "--resume", *OTHER, "--distributed.devices", devices)
    assert done.code == 2
    assert len(done.errors) == 1
    named = [line.split()[0] for line in done.stderr.splitlines() if line.startswith("  ")]
    assert named == ["dataset", "lanes", "seed"]
    assert "--allow dataset,lanes,seed" in done.stderr
    assert "Traceback" not in done.stderr
    assert result(stopped.parent) == before


def test_what_is_not_allowed_is_an_error_though_the_rest_is_allowed(stopped):
    done = train(stopped, "--resume", *OTHER, "--allow", "lanes,dataset")
    assert done.code == 2
    named = [line.split()[0] for line in done.stderr.splitlines() if line.startswith("  ")]
    assert named == ["seed"]


def test_what_is_allowed_goes_on_and_says_so(stopped):
    done = train(stopped, "--resume", *OTHER, "--allow", "lanes,dataset,seed").require_success()
    said = [line for line in done.stderr.splitlines() if line.startswith("resuming although")]
    assert [line.split(": ")[1].split()[0] for line in said] == ["dataset", "lanes", "seed", "task"]
    assert "step-000007: 7 of 12 steps were taken" in done.stderr
    assert len(result(stopped.parent)[1]) == 12


@pytest.mark.parametrize("devices", [*slow(1), 2])
def test_another_model_is_an_error_that_names_what_does_not_fit(stopped, devices):
    before = result(stopped.parent)
    done = train(stopped, "--resume", "--task.init_args.width", 4, "--distributed.devices", devices)
    assert done.code == 2
    assert len(done.errors) == 1
    assert "model 0.weight is (8, 1) of torch.float32 in it and (4, 1)" in done.stderr
    assert "Traceback" not in done.stderr
    assert result(stopped.parent) == before


def test_allow_names_only_what_may_differ(stopped):
    done = train(stopped, "--resume", "--allow", "precision")
    assert done.code == 2
    (said,) = done.errors
    assert said == (
        "error: --allow must list what may differ, out of lanes, dataset, seed, num_steps, "
        "max_grad_norm, ema_decay, optimizer: "
        "got 'precision'."
    )


def test_run_jsonl_tells_each_start_and_how_it_ended(tmp_path, whole):
    config = write_noisy(tmp_path, every_steps=1)
    record = tmp_path / "run" / "run.jsonl"
    slowly = ("--task.init_args.sleep_seconds", 0.1)

    def begin(*arguments):
        """Start the run, and wait until it has two more checkpoints."""
        saved = {*tmp_path.glob("run/checkpoints/step-*")}
        command = Warm("train", config, *slowly, *arguments)
        wait_for(lambda: len({*tmp_path.glob("run/checkpoints/step-*")} - saved) >= 2)
        return command

    with begin("--distributed.devices", 2) as command:
        for pid in command.pids():
            os.kill(pid, signal.SIGKILL)
        command.finish()
    with begin("--resume", "--distributed.devices", 3) as command:
        os.kill(command.worker(1), signal.SIGTERM)
        assert command.finish().code == 75
    newest = max(tmp_path.glob("run/checkpoints/step-*")).name
    train(config, "--resume", "--train.max_steps", 12, "--distributed.devices", 1).require_success()
    assert result(tmp_path) == result(whole)

    digest = sha256((ROOT / "tests/integration/tasks.py").read_bytes()).hexdigest()
    first, second, preempted, third, finished = map(json.loads, record.read_text().splitlines())
    assert [line["event"] for line in (first, second, preempted, third, finished)] == [
        "start",  # of a run that was killed there is no end
        *("start", "end", "start", "end"),
    ]
    assert len({line["run_id"] for line in (first, second, preempted, third, finished)}) == 1
    assert len({first["id"], second["id"], third["id"]}) == 3
    assert (preempted["id"], finished["id"]) == (second["id"], third["id"])
    assert (preempted["reason"], finished["reason"]) == ("preempted", "finished")
    assert f"step-{preempted['last_step']:06d}" == newest
    assert (third["first_step"], finished["last_step"]) == (preempted["last_step"] + 1, 12)
    assert 1 == first["first_step"] < second["first_step"] < third["first_step"]
    for start, devices in ((first, 2), (second, 3), (third, 1)):
        assert start["world_size"] == devices
        assert start["devices"] == {"cpu": devices}
        assert start["hosts"] == {socket.gethostname(): devices}
        assert start["config"]["distributed"]["devices"] == devices
        assert start["sources"]["tasks"] == digest


@pytest.mark.parametrize(
    ("devices", "launcher"), [(1, ()), (2, ()), pytest.param(2, TORCHRUN, marks=pytest.mark.slow)]
)
def test_run_jsonl_tells_the_error_that_ended_a_run(tmp_path, devices, launcher):
    """It is that of another rank than the one that writes the file."""
    config = write_config(tmp_path, "tasks.RaisesInForward")
    arguments = ("train", config, "--task.init_args.rank", devices - 1, "--distributed.devices", devices)
    if launcher:
        run(*launcher, devices, "-m", "lanewise", *arguments)
    else:
        lanewise(*arguments)
    start, end = map(json.loads, (tmp_path / "run" / "run.jsonl").read_text().splitlines())
    assert (end["event"], end["id"], end["reason"]) == ("end", start["id"], "error")
    assert end["error"] == "ValueError"
    assert "the image is upside down" in end["text"]


def test_a_run_that_fails_before_it_begins_changes_no_end(tmp_path, stopped):
    record = tmp_path / "run" / "run.jsonl"
    before = record.read_text()
    record.write_text(before.splitlines(keepends=True)[0])  # as if that start had been killed
    assert train(stopped, "--resume", "--train.seed", 7).code == 2
    assert record.read_text() == before.splitlines(keepends=True)[0]


def test_run_jsonl_tells_that_rank_0_was_killed(tmp_path):
    config = write_noisy(tmp_path)
    slowly = ("--task.init_args.sleep_seconds", 0.1, "--distributed.devices", 2)
    with Warm("train", config, *slowly) as command:
        wait_for((tmp_path / "run" / "metrics.jsonl").exists)
        os.kill(command.worker(0), signal.SIGKILL)
        command.finish()
    start, end = map(json.loads, (tmp_path / "run" / "run.jsonl").read_text().splitlines())
    assert (end["event"], end["id"], end["reason"]) == ("end", start["id"], "error")
    assert end["error"] == "LaunchError"
    assert "rank 0" in end["text"]
    assert end["last_step"] >= 1
