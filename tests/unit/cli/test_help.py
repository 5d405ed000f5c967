"""The help of a command lists whatever it declares, and that of train every key of the configuration."""

from dataclasses import replace

import pytest

from lanewise.cli.arguments import Argument, Arguments, Command
from lanewise.cli.help import write_help, write_keys
from lanewise.cli.main import COMMANDS, main

COMMAND = Command(
    name="bench",
    text="Measures.",
    run=lambda _: 0,
    operands=(Argument("CONFIG", "the configuration"), Argument("OTHER", "another", default="")),
    options=(
        Argument("--fast", "leaves out " + "what takes long, " * 9, default=False),
        Argument("--output", "where to write", "FILE"),
    ),
    has_overrides=True,
    more_help=lambda _: "More.\n",
)


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")


def test_every_argument_is_listed():
    assert (
        write_help(COMMAND, Arguments())
        == """\
usage: lanewise bench CONFIG [OTHER] [--fast] --output FILE [--key.path value ...]

Measures.

  CONFIG            the configuration
  OTHER             another
  --fast            leaves out what takes long, what takes long, what takes long, what takes long, what takes
                    long, what takes long, what takes long, what takes long, what takes long,
  --output FILE     where to write
  --key.path value  sets a key of the configuration; `lanewise train --help` lists them
  --help            shows this

More.
"""
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_shows_its_help(capsys, command):
    assert main([command, "--help"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: lanewise {command}")
    assert all(len(line) <= 110 for line in shown.splitlines())
    if command not in ("init", "runs", "schema"):  # which need no argument
        assert main([command]) == 2
        said, usage = capsys.readouterr().err.split("\nusage: ")
        assert said.startswith(f"error: {command} needs ")
        assert shown.startswith(f"usage: {usage}")


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help_is_no_wider_than_the_terminal(capsys, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*[command] * (command is not None), "--help"]) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if len(line) > 80] == []


def test_a_long_program_goes_on_after_a_backslash(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    text = (
        "Measures what takes long, and what does not.\n\n  lanewise bench run.yaml --output runs/bench.json"
    )
    assert """
Measures what takes long, and what does
not.

  lanewise bench run.yaml --output \\
      runs/bench.json
""" in write_help(replace(COMMAND, text=text), Arguments())


@pytest.mark.parametrize(
    "lines",
    [
        "task (required): The user's Task.\n  --task.class_path  text; required\n",
        "  --batch.micro_batch_size  whole number, at least 1; required\n      Samples of one lane",
        "  --precision  float32, tf32, bf16, fp16; default: float32\n",
        "  --train.epochs  whole number, at least 1; default: unset\n",
        "\ndata.order: Order of an epoch's samples; unset: blocked for a dataset in blocks, else shuffled.\n",
        "  --callbacks  list of sections with class_path and init_args; default: none\n",
        "\ncheckpoint.every: How often to save; every ten minutes by default.\n  --checkpoint.every.steps  ",
        "  --distributed.fsdp.blocks  list of text; default: none\n",
    ],
)
def test_every_key_of_the_configuration_is_listed(lines):
    assert lines in write_keys()
