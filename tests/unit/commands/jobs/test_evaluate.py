"""A run that came from somebody else does not run code that it brings, unless the user says so."""

import dataclasses
import json
import re
import sys
from pathlib import Path

import pytest

from lanewise.commands.jobs.evaluate import evaluate_job
from lanewise.config import ClassConfig, DataConfig
from lanewise.config.class_path import add_search_path
from lanewise.config.load import Override, dump_config, load_config
from lanewise.errors import CheckpointError, ConfigError
from lanewise.processes.world.environment import Environment
from tests.distributed.tasks import Smooth, configure

MODULE = """
import pathlib
from tests.distributed.tasks import Smooth
pathlib.Path(__file__).with_suffix(".ran").touch()
class Task(Smooth):
    def __init__(self, note=None): super().__init__()
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """The working directory, a project with a module and a run in its `runs/digits`."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "digits").mkdir(parents=True)
    (tmp_path / "runs" / "digits" / "model.safetensors").touch()
    write_module(tmp_path / "own_task.py")
    return tmp_path


def write_module(path: Path) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(MODULE)
    return path


def write_run(project: Path, class_path: str, search_path: str | Path | None) -> Path:
    run_dir = project / "runs" / "digits"
    config = dataclasses.replace(
        configure(Smooth),
        task=ClassConfig(class_path=class_path),
        search_path=None if search_path is None else str(search_path),
    )
    (run_dir / "config.yaml").write_text(dump_config(config))
    return run_dir


def check(run_dir: Path, *overrides: Override, trust: bool = False) -> None:
    """Do what `lanewise.commands.jobs.start.start` does before any worker starts."""
    job = evaluate_job(run_dir, overrides, trust=trust)
    add_search_path(job.config.search_path)
    job.check(Environment())


def test_the_weights_are_those_that_training_evaluated(project):
    """With a moving average, `lanewise evaluate RUN` gave other values than the training's last line."""
    run_dir = write_run(project, "tests.distributed.tasks.Smooth", None)
    assert evaluate_job(run_dir).model_file == run_dir / "model.safetensors"
    text = (run_dir / "config.yaml").read_text()
    (run_dir / "config.yaml").write_text(text.replace("ema_decay: null", "ema_decay: 0.9"))
    with pytest.raises(CheckpointError, match=r"is no finished run: there is no .*averaged\.safetensors"):
        evaluate_job(run_dir)
    (run_dir / "averaged.safetensors").touch()
    assert evaluate_job(run_dir).model_file == run_dir / "averaged.safetensors"
    assert evaluate_job(run_dir / "model.safetensors").model_file == run_dir / "model.safetensors"


def test_the_best_weights_are_taken_where_the_run_keeps_them(project):
    """By `evaluate`, `predict` and `load`, which took the last ones."""
    run_dir = write_run(project, "tests.distributed.tasks.Smooth", None)
    (run_dir / "best.safetensors").touch()
    last = evaluate_job(run_dir, weights="last")
    assert (last.model_file, last.text) == (run_dir / "model.safetensors", "weights: last")
    for weights in (None, "best"):
        assert evaluate_job(run_dir, weights=weights).model_file == run_dir / "best.safetensors"
    named = evaluate_job(run_dir, weights=run_dir / "model.safetensors")
    assert named.text == f"weights: {run_dir / 'model.safetensors'}"
    with pytest.raises(ConfigError, match="is a configuration, which has no weights"):
        evaluate_job(run_dir / "config.yaml", weights="best")
    # A mistyped name was called a fault of the run, which is finished.
    with pytest.raises(CheckpointError, match=r"^bst is no file of weights: there is no bst"):
        evaluate_job(run_dir, weights="bst")


def test_a_name_that_no_file_can_have_is_no_run(tmp_path):
    for name in ("n" * 300, "a\0b"):
        with pytest.raises(CheckpointError, match="is no finished run"):
            evaluate_job(tmp_path / name)


def test_code_of_the_project_runs_though_the_run_lies_in_it(project):
    check(write_run(project, "own_task.Task", project))
    assert (project / "own_task.ran").exists()


def test_the_user_may_name_where_the_code_lies(project):
    check(write_run(project, "own_task.Task", "/nowhere"), Override("search_path", str(project)))
    assert (project / "own_task.ran").exists()


def test_from_another_directory_the_command_is_told_that_names_the_code(project, monkeypatch):
    """A run of one's own meets it, too: whose the folder is that only the run names, nobody knows."""
    run_dir = write_run(project, "own_task.Task", project)
    monkeypatch.chdir("/")
    monkeypatch.setattr(sys, "argv", ["/bin/lanewise", "evaluate", str(run_dir)])
    told = (
        f"If it is yours: lanewise evaluate {run_dir} --search_path {project}. If you trust it, add --trust"
    )
    with pytest.raises(ConfigError, match=re.escape(told)):
        check(run_dir)
    assert not (project / "own_task.ran").exists()
    check(run_dir, Override("search_path", str(project)))
    assert (project / "own_task.ran").exists()


def test_a_configuration_is_the_users_choice_unless_it_lies_in_a_run(project):
    """Given with weights that lie elsewhere, that of a stranger's run ran whatever it named."""
    run_dir = write_run(project, "evil_task.Task", "code")
    path = write_module(run_dir / "code" / "evil_task.py")
    config, weights = run_dir / "config.yaml", run_dir / "model.safetensors"
    (run_dir / "run.jsonl").touch()
    job = evaluate_job(config, weights=weights)
    with pytest.raises(ConfigError, match="evil_task would be imported from"):
        job.check(Environment())
    assert not path.with_suffix(".ran").exists()
    (run_dir / "run.jsonl").unlink()
    assert evaluate_job(config, weights=weights).untrusted == ()


def test_a_project_that_moved_is_asked_for(project, monkeypatch):
    """The nearest module of Python was once suggested in its place."""
    run_dir = write_run(project, "own_task.Task", "/nowhere")
    said = r"^the run's project folder /nowhere is not there any more: .* Give --search_path FOLDER"
    with pytest.raises(ConfigError, match=said):
        evaluate_job(run_dir)
    monkeypatch.chdir(project.parent)
    check(run_dir, Override("search_path", project.name))
    assert (project / "own_task.ran").exists()
    evaluate_job(write_run(project, "tests.distributed.tasks.Smooth", "/nowhere"))


def test_a_package_of_the_environment_needs_no_trust(project):
    check(write_run(project, "tests.distributed.tasks.Smooth", None))


@pytest.mark.parametrize(
    ("class_path", "search_path", "module"),
    [
        ("evil_task.Task", None, "runs/digits/evil_task.py"),
        ("evil_task.Task", ".", "runs/digits/evil_task.py"),
        ("evil_task.Task", "code", "runs/digits/code/evil_task.py"),
        ("evil_task.Task", "../../code", "code/evil_task.py"),
        ("evil_task.Task", "{project}/runs/digits", "runs/digits/evil_task.py"),
        ("evil_task.Task", "{project}/link", "runs/digits/evil_task.py"),
        ("evil_task.Task", "{project}/runs/digits/out", "code/evil_task.py"),
        ("runs.digits.evil_task.Task", "{project}", "runs/digits/evil_task.py"),
        ("pack.evil_task.Task", None, "runs/digits/pack/evil_task.py"),
    ],
    ids=[
        "null",
        "here",
        "below",
        "beside",
        "absolute",
        "link into it",
        "link out of it",
        "through",
        "package",
    ],
)
def test_code_that_came_with_a_run_needs_trust(project, class_path, search_path, module):
    (project / "link").symlink_to("runs/digits")
    (project / "runs" / "digits" / "out").symlink_to("../../code")
    path = write_module(project / module)
    run_dir = write_run(project, class_path, search_path and search_path.format(project=project))
    with pytest.raises(ConfigError, match=r"^task.class_path: .*evil_task would be imported from .*--trust"):
        check(run_dir)
    assert not path.with_suffix(".ran").exists()
    check(run_dir, trust=True)
    assert path.with_suffix(".ran").exists()


def test_a_run_starts_no_program(project):
    """It did, where an argument of the task has no type."""
    run_dir = write_run(project, "own_task.Task", project)
    popen = {"class_path": "subprocess.Popen", "init_args": {"args": ["touch", str(project / "ran")]}}
    named = Override("task.init_args.note", json.dumps(popen))
    with pytest.raises(ConfigError, match=r"^task.init_args.note.class_path: subprocess.Popen .*--trust"):
        check(run_dir, named)
    check(run_dir, named, trust=True)


def test_what_lies_in_a_run_does_not_take_the_place_of_an_installed_module(project):
    for name in ("torch", "wave", "tests"):
        write_module(project / "runs" / "digits" / f"{name}.py")
    check(write_run(project, "tests.distributed.tasks.Smooth", None))
    import wave

    assert "digits" not in str(wave.__file__)
    assert not list(project.rglob("*.ran"))


def test_an_optimizer_is_code_too(project):
    path = write_module(project / "runs" / "digits" / "evil_task.py")
    run_dir = write_run(project, "own_task.Task", project)
    with pytest.raises(ConfigError, match=r"^optimizer.class_path: .*evil_task would be imported from"):
        check(run_dir, Override("optimizer.class_path", "runs.digits.evil_task.Task"))
    assert not path.with_suffix(".ran").exists()


def test_without_trust_nothing_is_left_of_the_guard(project):
    path, finders = list(sys.path), list(sys.meta_path)
    check(write_run(project, "tests.distributed.tasks.Smooth", None))
    assert (sys.path, sys.meta_path) == (path, finders)


@pytest.mark.parametrize(
    ("overrides", "devices"),
    [
        ([], None),
        ([Override("distributed.devices", "3")], 3),
        ([Override("distributed", "{devices: 3}")], 3),
        ([Override("distributed.equality", "exact")], None),
    ],
)
def test_a_run_on_two_devices_is_evaluated_on_one_unless_the_user_says_otherwise(project, overrides, devices):
    run_dir = write_run(project, "own_task.Task", project)
    (run_dir / "config.yaml").write_text(
        (run_dir / "config.yaml").read_text().replace("devices: null", "devices: 2")
    )
    assert load_config(str(run_dir / "config.yaml")).distributed.devices == 2
    config = evaluate_job(run_dir, overrides).config
    assert config.distributed.devices == devices


def test_a_run_with_sync_batch_norm_is_evaluated_on_a_cpu_and_on_any_number_of_devices(project):
    run_dir = write_run(project, "own_task.Task", project)
    config = load_config(str(run_dir / "config.yaml"))
    distributed = dataclasses.replace(config.distributed, equality="close", sync_batch_norm=True)
    config = dataclasses.replace(config, distributed=distributed, data=DataConfig(drop_last=True))
    (run_dir / "config.yaml").write_text(dump_config(config))
    check(run_dir, Override("distributed.device_type", "cpu"))
    three = evaluate_job(run_dir, [Override("distributed.devices", "3")]).config  # of eight lanes
    assert not three.distributed.sync_batch_norm
