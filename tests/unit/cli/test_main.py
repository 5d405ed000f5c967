"""The command line finds its commands, and shows its own help without waiting for anything."""

import json
import os
import re
import subprocess
import sys
from dataclasses import fields, replace
from importlib import import_module
from pathlib import Path

import pytest

from lanewise.cli.arguments import read_arguments
from lanewise.cli.help import write_keys
from lanewise.cli.main import COMMANDS, main
from lanewise.config import RunConfig
from tests.integration.command import write_config


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_is_declared_in_the_module_of_its_name(name):
    command = import_module(f"lanewise.cli.{name}").COMMAND
    form, _ = COMMANDS[name]
    assert command.name == name
    assert [one.usage.removesuffix(" ...") for one in command.operands][:1] == form.split()[:1]
    needed_options = {word for word in form.split() if word.startswith("--")}
    assert needed_options <= {option.name for option in command.options}


@pytest.mark.parametrize("name", ["train", "evaluate", "verify", "plan"])
def test_no_key_of_the_configuration_is_taken_for_a_misspelt_option(name):
    keys = re.findall(r"^  --(\S+)  ", write_keys(), re.MULTILINE)
    keys += [field.name for field in fields(RunConfig)]
    command = import_module(f"lanewise.cli.{name}").COMMAND
    given = read_arguments(command, ["operand", *(f"--{key}=1" for key in keys)])
    assert [override.key for override in given.overrides] == keys


@pytest.mark.parametrize("name", ["replay", "diff", "audit"])
def test_an_error_of_ours_is_no_difference(monkeypatch, capsys, name):
    """Python's own exit code after a traceback is 1, which says that something differs."""

    def fail(_arguments):
        raise TypeError("a bug")

    module = import_module(f"lanewise.cli.{name}")
    monkeypatch.setattr(module, "COMMAND", replace(module.COMMAND, run=fail))
    assert main([name, *(operand.name for operand in module.COMMAND.operands)]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "TypeError: a bug"
    monkeypatch.setattr(module, "COMMAND", replace(module.COMMAND, run=lambda _: print("x" * 10**6) or 0))
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main([name, *(operand.name for operand in module.COMMAND.operands)]) == 2


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_the_help_lists_each_command(capsys, monkeypatch, arguments):
    monkeypatch.setenv("COLUMNS", "120")
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    for name, (form, purpose) in COMMANDS.items():
        assert f"  {name} {form} " in shown
        assert f"  {purpose}\n" in shown


def test_the_help_imports_nothing_that_takes_long():
    script = (
        "import sys; before = set(sys.modules); from lanewise.cli.main import main; main(['--help'])\n"
        "print(*sorted(set(sys.modules) - before))"
    )
    shown = subprocess.check_output([sys.executable, "-c", script], text=True)
    imported = shown.splitlines()[-1].split()
    assert [name for name in imported if name.startswith("lanewise")] == [
        "lanewise",
        "lanewise.cli",
        "lanewise.cli.main",
    ]
    assert not {"dataclasses", "inspect", "yaml", "torch"} & set(imported)


@pytest.mark.parametrize(
    ("argument", "hint"),
    [
        ("trian", "Did you mean train?"),
        ("verfy", "Did you mean verify?"),
        ("--hlep", "Did you mean --help?"),
        (
            "run.yaml",
            "Valid here: " + ", ".join([*COMMANDS, "--help", "--version."]),
        ),
    ],
)
def test_what_is_no_command_is_named_with_the_nearest_one(capsys, argument, hint):
    assert main([argument]) == 2
    assert capsys.readouterr().err == f"error: {argument} is not a command of lanewise. {hint}\n"


@pytest.mark.parametrize(
    ("steps", "said"),
    [([], "no checkpoint was saved yet"), ([2, 10], "--resume continues from {}/step-000010")],
)
def test_an_interrupted_training_says_from_where_to_go_on(tmp_path, monkeypatch, capsys, steps, said):
    checkpoints = tmp_path / "run" / "checkpoints"

    def save_and_interrupt(*_: object, **__: object) -> None:
        for step in steps:
            (checkpoints / f"step-{step:06d}").mkdir(parents=True)
        raise KeyboardInterrupt

    monkeypatch.setattr("lanewise.commands.jobs.start.run_in_world", save_and_interrupt)
    monkeypatch.setattr(
        "lanewise.commands.jobs.signals.watch_until_exit", lambda: None
    )  # the signals are the tests' own
    assert main(["train", str(write_config(tmp_path))]) == 130
    assert capsys.readouterr().err == f"interrupted: {said.format(checkpoints)}\n"


@pytest.mark.parametrize("buffering", [1, -1])
def test_output_that_nobody_takes_is_one_error(capsys, monkeypatch, buffering):
    with Path("/dev/full").open("w", buffering=buffering) as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["--help"]) == 1
    assert capsys.readouterr().err == "error: the output cannot be written: No space left on device.\n"


def test_a_reader_that_has_enough_is_no_error(capsys, monkeypatch):
    """As `lanewise runs | head`."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert main(["--help"]) == 141
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("option", ["--local-rank=1", "--local_rank=0"])
def test_the_local_rank_of_torch_distributed_launch_is_dropped(capsys, option):
    assert main([option, "train"]) == 2
    assert "train needs CONFIG" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-g", "4"], "-g is not an option of train. Write --distributed.devices 4."),
        (["-n", "2"], "torchrun --nnodes N --node-rank NR --master-addr HOST --master-port 29400"),
        (["-nr", "0"], "--nproc-per-node G -m lanewise train ..."),
        (["--gpus", "4"], "gpus is not a key of the configuration. Did you mean distributed.devices?"),
        (["--cuda_devices", "[0, 1]"], "Did you mean distributed.devices?"),
        (["--distributed.cuda_devices", "[0]"], "Did you mean distributed.devices?"),
        (["--devices", "[0, 1]"], "Did you mean distributed.devices?"),
        (["--distributed.devices", "cuda:0,cuda:1"], "Write [cuda:0,cuda:1]."),
        (["--lr", "0.1"], "Did you mean optimizer.init_args.lr?"),
        (["--optimizer.lr", "0.1"], "Did you mean optimizer.init_args.lr?"),
        (["--task.width", "3"], "Did you mean task.init_args.width?"),
        (
            ["--scheduler.warmup", "1.5"],
            "must be a whole number at least 0 or a number at least 0 and less than 1: got 1.5.",
        ),
    ],
)
def test_what_other_programs_take_is_answered_with_what_to_write(tmp_path, capsys, arguments, said):
    assert main(["train", str(write_config(tmp_path)), *arguments]) == 2
    shown = capsys.readouterr().err
    assert said in shown
    assert len(shown.splitlines()) == 1


def test_a_folder_in_place_of_a_configuration(tmp_path, capsys):
    assert main(["train", str(tmp_path)]) == 2
    expected = f"error: {tmp_path} is a folder. Name the configuration in it, as in {tmp_path}/CONFIG.yaml.\n"
    assert capsys.readouterr().err == expected
    file = write_config(tmp_path)
    assert main(["train", str(tmp_path)]) == 2
    assert f"as in {file}." in capsys.readouterr().err


def test_json_is_printed_alone(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    assert main(["runs", str(tmp_path), "--json", "-"]) == 0
    assert [run["run_dir"] for run in json.loads(capsys.readouterr().out)["runs"]] == [f"{tmp_path}/run"]


def test_an_error_of_another_file_stays_what_it_is(monkeypatch):
    def fail(_: object) -> None:
        raise OSError("of a task")

    monkeypatch.setattr("lanewise.cli.main._run", fail)
    with pytest.raises(OSError, match="of a task"):
        main(["train"])
