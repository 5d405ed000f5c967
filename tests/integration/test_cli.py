"""The command line itself: help, formats, overrides and what the console shows."""

import json
import os
import pty
import re
import shutil
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

from tests.integration.command import LANEWISE, Warm, lanewise, run, train, write_config
from tests.integration.terminal import lines_left_on

TOML = """
search_path = "{search_path}"
task = {{ class_path = "tasks.Line" }}
batch = {{ global_batch_size = 8, micro_batch_size = 2 }}
optimizer = {{ class_path = "torch.optim.SGD", init_args = {{ lr = 0.01 }} }}

[train]
epochs = 2
run_dir = "{run_dir}"

[distributed]
equality = "exact"
"""

JSONNET = """
local tree = {tree};
tree {{ train+: {{ epochs: 1 + 1 }} }}
"""

FORMATS = {
    "yaml": yaml.safe_dump,
    "json": json.dumps,
    "toml": lambda tree: TOML.format(search_path=tree["search_path"], run_dir=tree["train"]["run_dir"]),
    "jsonnet": lambda tree: JSONNET.format(tree=json.dumps(tree)),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A run with its output in a pipe: how it ended and its folder."""
    folder = tmp_path_factory.mktemp("plain")
    return train(write_config(folder)).require_success(), folder / "run"


@pytest.mark.parametrize("arguments", [[], ["--help"], ["--version"], ["train"], ["train", "--help"]])
def test_what_needs_no_configuration_imports_no_torch(arguments):
    script = (
        "import sys; from lanewise.cli.main import main; main(sys.argv[1:]); print('torch' in sys.modules)"
    )
    done = run(sys.executable, "-c", script, *arguments)
    assert done.code == 0
    assert done.stdout.splitlines()[-1] == "False"


def test_the_help_of_a_configuration_lists_the_arguments_of_its_classes(tmp_path):
    done = train(write_config(tmp_path), "--help")
    assert (done.code, done.stderr) == (0, "")
    assert "--task.init_args.num_samples  int, default 22\n      size of the dataset." in done.stdout
    assert "--optimizer.init_args.momentum  float, default 0" in done.stdout
    assert not (tmp_path / "run").exists()


def test_the_version_is_that_of_the_package():
    assert lanewise("--version").stdout == f"{version('lanewise')}\n"


def test_python_m_runs_the_same_program():
    assert run(sys.executable, "-m", "lanewise", "--help").stdout == run(*LANEWISE, "--help").stdout


@pytest.mark.parametrize("ending", FORMATS)
def test_the_format_of_the_configuration_changes_nothing(tmp_path, plain, ending):
    _, run_dir = plain
    tree = yaml.safe_load(write_config(tmp_path).read_text())
    path = tmp_path / f"run.{ending}"
    path.write_text(FORMATS[ending](tree))
    train(path).require_success()
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == (
        run_dir / "model.safetensors"
    ).read_bytes()


def test_any_key_can_be_overridden(tmp_path):
    train(
        write_config(tmp_path, optimizer={"class_path": "torch.optim.Adam"}),
        *("--train.max_steps", 2),
        "--task.init_args={num_samples: 9}",
        *("--optimizer.class_path", "torch.optim.SGD", "--optimizer.init_args.lr", "1e-2"),
        *("--optimizer.init_args.lr", "5e-3"),
        *("--scheduler", "null"),
    ).require_success()
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert config["train"]["max_steps"] == 2
    assert config["task"] == {"class_path": "tasks.Line", "init_args": {"num_samples": 9}}
    optimizer = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.005}, "closure": False}
    assert config["optimizer"] == {**optimizer, "parameter_groups": []}
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["train/learning_rate"] for line in lines] == [0.005, 0.005]


@pytest.mark.parametrize(
    ("overrides", "numbers"),
    [
        (
            [],
            [
                "samples: 22",
                "in steps of 8 = 4 lanes x 2",
                "steps: 3 in an epoch",
                "6 in all",
                "1 process on cpu",
            ],
        ),
        (
            ["--distributed.devices=3"],
            ["3 processes on cpu", "reducer ddp (exact)", "lanes each: 1 or 2;"],
        ),
    ],
)
def test_what_was_derived_is_shown_before_the_first_step(tmp_path, overrides, numbers):
    done = train(write_config(tmp_path), *overrides).require_success()
    before, step, _ = done.stderr.partition("epoch 1  step 1/6")
    assert step
    for number in [*numbers, "threads each: 1"]:
        assert number in before


def test_a_console_that_is_no_terminal_gets_plain_lines(plain):
    done, run_dir = plain
    assert "\x1b" not in done.stderr
    assert "\r" not in done.stderr
    assert [line.split()[3] for line in done.stderr.splitlines() if line.startswith("epoch")] == [
        "1/6",
        "6/6",
    ]
    assert done.stderr.splitlines()[-1] == f"model after step 6: {run_dir / 'model.safetensors'}"
    assert done.stdout == ""


def test_a_terminal_gets_one_progress_bar(tmp_path):
    terminal, end = pty.openpty()
    variables = {"TERM": "xterm", "COLUMNS": "120", "NO_COLOR": None, "TTY_COMPATIBLE": None}
    path = write_config(tmp_path, distributed={"devices": 2})
    with Warm("train", path, output=end, variables=variables) as command:
        os.close(end)
        lines = lines_left_on(terminal)
        os.close(terminal)
        assert command.finish().code == 0
    (bar,) = [line for line in lines if "6/6" in line]
    assert re.match(r"epoch 2 .*6/6 loss \d+\.\d+ ", bar)
    assert not any("step 1/6" in line for line in lines)


def test_modules_are_found_beside_the_configuration_and_run_dir_in_the_working_directory(tmp_path):
    folder, cwd = tmp_path / "project", tmp_path / "elsewhere"
    folder.mkdir()
    cwd.mkdir()
    shutil.copy(Path(__file__).with_name("tasks.py"), folder / "digits.py")
    path = write_config(folder, "digits.Line", search_path=None)
    train(path, "--train.run_dir=here", "--train.max_steps=1", cwd=cwd).require_success()
    assert (cwd / "here" / "model.safetensors").exists()
