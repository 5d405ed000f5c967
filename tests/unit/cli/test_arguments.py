"""Every command reads its arguments by the same rules, and says of each mistake what is wrong."""

from dataclasses import replace
from pathlib import Path

import pytest

from lanewise.cli.arguments import Argument, Arguments, Command, read_arguments, read_path
from lanewise.cli.main import main
from lanewise.config.load import Override
from lanewise.errors import ConfigError


def read_number(text: str) -> int:
    if not text.isdecimal():
        raise ValueError("be a number")
    return int(text)


CONFIG = Argument("CONFIG", "the configuration", read=read_path)
OTHER = Argument("OTHER", "another one", default="none")
RESUME = Argument("--resume", "goes on", default=False)
DEVICES = Argument("--devices", "how many", "N", read_number, default=1)
JSON = Argument("--json", "writes the result", "FILE", read_path, default=None)
OUTPUT = Argument("--output", "what to write", "FILE", read_path)
VERIFY = Command(
    name="verify",
    text="Verifies.",
    run=lambda _: 0,
    operands=(CONFIG, OTHER),
    options=(RESUME, DEVICES, JSON),
    has_overrides=True,
)
EXPORT = Command(name="export", text="Exports.", run=lambda _: 0, operands=(CONFIG,), options=(OUTPUT,))


def mistakes_of(arguments: list[str], command: Command = VERIFY) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read_arguments(command, arguments)
    return list(caught.value.mistakes)


@pytest.mark.parametrize(
    "arguments",
    [
        ["run.yaml", "--devices", "2", "--resume", "--train.seed", "-1", "--data=x=y"],
        ["--devices=2", "--train.seed=-1", "--resume", "--data=x=y", "run.yaml"],
        ["--train.seed", "-1", "--resume", "run.yaml", "--data", "x=y", "--devices", "2"],
    ],
)
def test_the_order_and_the_equals_sign_are_free(arguments):
    given = read_arguments(VERIFY, arguments)
    assert given == Arguments(
        values={CONFIG: Path("run.yaml"), RESUME: True, DEVICES: 2},
        overrides=[Override("train.seed", "-1"), Override("data", "x=y")],
    )
    assert (given[CONFIG], given[OTHER], given[RESUME]) == (Path("run.yaml"), "none", True)
    assert (given[DEVICES], given[JSON]) == (2, None)


def test_what_follows_two_dashes_is_a_program_where_a_command_takes_one():
    observes = replace(VERIFY, takes_program=True)
    given = read_arguments(observes, ["--devices", "2", "--", "python", "train.py", "--devices", "--", "x"])
    assert given.program == ["python", "train.py", "--devices", "--", "x"]
    assert given.values == {DEVICES: 2}
    assert read_arguments(observes, ["run.yaml"]).program is None


def test_help_needs_nothing_else():
    assert read_arguments(EXPORT, ["--help"]) == Arguments(wants_help=True)
    assert read_arguments(EXPORT, ["-h"]) == Arguments(wants_help=True)
    assert mistakes_of([], EXPORT) == [
        "export needs CONFIG: got none. Name it.",
        "export needs --output FILE: got none. Add it.",
    ]


def test_a_key_is_repeated_as_often_as_one_likes_and_keeps_its_place():
    given = read_arguments(VERIFY, ["run.yaml", "--a.b=1", "--a", "{}", "--a.b", "2"])
    assert given.overrides == [Override("a.b", "1"), Override("a", "{}"), Override("a.b", "2")]


def test_a_key_without_a_value_is_left_to_the_configuration():
    assert read_arguments(VERIFY, ["run.yaml", "--train.seed", "--resume"]).overrides == [
        Override("train.seed", None)
    ]


@pytest.mark.parametrize(
    ("arguments", "mistake"),
    [
        (["--resume"], "verify needs CONFIG: got none. Name it."),
        (
            ["a", "b", "c"],
            "verify takes CONFIG [OTHER]: got c as well. An option begins with --; quote what has spaces.",
        ),
        (["a", "--resume=3"], "--resume takes no value: got '3'. Write --resume alone."),
        (["a", "--resume", "--resume"], "--resume is given twice. Give it once."),
        (["a", "--devices=1", "--devices", "2"], "--devices is given twice. Give it once."),
        (["a", "--devices"], "--devices needs a value. Write --devices VALUE, or --devices=VALUE."),
        (["a", "--devices="], "--devices needs a value. Write --devices VALUE, or --devices=VALUE."),
        (
            ["a", "--devices", "--resume"],
            "--devices needs a value. Write --devices VALUE, or --devices=VALUE.",
        ),
        (["a", "--devices", "two"], "--devices must be a number: got 'two'."),
        (["a", "--device", "2"], "--device is not an option of verify. Did you mean --devices?"),
        (["--resum", "a"], "--resum is not an option of verify. Did you mean --resume?"),
        (["a", "--hlep"], "--hlep is not an option of verify. Did you mean --help?"),
        (
            ["a", "-x"],
            (
                "-x is not an option of verify. "
                "Valid here: --resume, --devices, --json, --key.path of the configuration, --help."
            ),
        ),
    ],
)
def test_each_mistake_is_named(arguments, mistake):
    assert mistakes_of(arguments) == [mistake]


def test_a_command_without_overrides_knows_its_options():
    assert mistakes_of(["run", "--output=a", "--train.seed=1"], EXPORT) == [
        "--train.seed is not an option of export. Valid here: --output, --help."
    ]


def test_all_mistakes_come_at_once():
    assert mistakes_of(["--resume=1", "--devices", "two", "--json"]) == [
        "--resume takes no value: got '1'. Write --resume alone.",
        "--devices must be a number: got 'two'.",
        "--json needs a value. Write --json VALUE, or --json=VALUE.",
        "verify needs CONFIG: got none. Name it.",
    ]


@pytest.mark.parametrize(
    ("arguments", "mistake"),
    [
        (["train", "--resume"], "train needs CONFIG: got none."),
        (["train", "--audit", "--allow=seed"], "train needs CONFIG: got none."),
        (["train", "run.yaml", "--allow=seed", "--allow", "lanes"], "--allow is given twice."),
        (["train", "run.yaml", "--allow=seed"], "--allow says what may differ on resume: add --resume"),
        (["evaluate", "--trust"], "evaluate needs RUN_OR_MODEL: got none."),
        (["verify", "--devices=2"], "verify needs CONFIG: got none."),
        (["verify", "run.yaml", "--steps=0"], "--steps must be a number from 1 on: got '0'."),
        (["audit", "--steps", "2"], "--steps is not an option of audit."),
        (["checkpoints", "one", "two"], "checkpoints takes RUN: got two as well."),
        (["export", "run", "--output=a", "--output=b"], "--output is given twice."),
        (["export", "run"], "export needs --output FILE: got none."),
    ],
)
def test_every_command_says_what_is_wrong_in_a_line(capsys, arguments, mistake):
    assert main(arguments) == 2
    assert f"error: {mistake}" in capsys.readouterr().err
