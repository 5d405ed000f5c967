"""Every command reads its arguments by the same rules, and says of each mistake what is wrong."""

import pytest

from lanewise.cli.main import main
from lanewise.cli.option import Given, Syntax, read_arguments
from lanewise.errors import ConfigError

SYNTAX = Syntax("verify", ("CONFIG", "[OTHER]"), ("--resume",), ("--devices", "--json"), has_overrides=True)
STRICT = Syntax("export", ("RUN",), options=("--output",))


def mistakes_of(arguments: list[str], syntax: Syntax = SYNTAX) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read_arguments(arguments, syntax)
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
    assert read_arguments(arguments, SYNTAX) == Given(
        names=["run.yaml"],
        flags={"--resume"},
        options={"--devices": "2"},
        overrides=["--train.seed=-1", "--data=x=y"],
    )


def test_help_needs_nothing_else():
    assert read_arguments(["--help"], SYNTAX) == Given(wants_help=True)
    assert read_arguments([], SYNTAX) == Given()


def test_a_key_without_a_value_is_left_to_the_configuration():
    assert read_arguments(["run.yaml", "--train.seed", "--resume"], SYNTAX).overrides == ["--train.seed"]


@pytest.mark.parametrize(
    ("arguments", "mistake"),
    [
        (["--resume"], "verify needs CONFIG: got none. Name it."),
        (["a", "b", "c"], "verify takes CONFIG [OTHER]: c is too much. An option begins with --."),
        (["a", "--resume=3"], "--resume takes no value: got '3'. Write --resume alone."),
        (["a", "--resume", "--resume"], "--resume is given twice. Give it once."),
        (["a", "--devices=1", "--devices", "2"], "--devices is given twice. Give it once."),
        (["a", "--devices"], "--devices needs a value. Write --devices VALUE, or --devices=VALUE."),
        (["a", "--devices="], "--devices needs a value. Write --devices VALUE, or --devices=VALUE."),
        (
            ["a", "--devices", "--resume"],
            "--devices needs a value. Write --devices VALUE, or --devices=VALUE.",
        ),
        (["a", "--device", "2"], "--device is not an option of verify. Did you mean --devices?"),
        (["a", "--resum"], "--resum is not an option of verify. Did you mean --resume?"),
    ],
)
def test_each_mistake_is_named(arguments, mistake):
    assert mistakes_of(arguments) == [mistake]


def test_a_command_without_overrides_knows_its_options():
    assert mistakes_of(["run", "--train.seed=1"], STRICT) == [
        "--train.seed is not an option of export. Valid here: --output, --help."
    ]


def test_all_mistakes_come_at_once():
    assert len(mistakes_of(["--resume=1", "--devices"])) == 3


@pytest.mark.parametrize(
    ("arguments", "mistake"),
    [
        (["train", "--resume"], "train needs CONFIG: got none."),
        (["train", "--audit", "--allow=seed"], "train needs CONFIG: got none."),
        (["train", "run.yaml", "--allow=seed", "--allow", "lanes"], "--allow is given twice."),
        (["evaluate", "--trust"], "evaluate needs RUN_OR_MODEL: got none."),
        (["verify", "--devices=2"], "verify needs CONFIG: got none."),
        (["audit", "--steps", "2"], "--steps is not an option of audit."),
        (["checkpoints", "one", "two"], "checkpoints takes RUN: two is too much."),
        (["export", "run", "--output=a", "--output=b"], "--output is given twice."),
        (["export", "run"], "export needs --output FILE: got none."),
    ],
)
def test_every_command_says_what_is_wrong_in_a_line(capsys, arguments, mistake):
    assert main(arguments) == 2
    assert f"error: {mistake}" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["train", "evaluate", "verify", "audit", "checkpoints", "export"])
def test_every_command_shows_its_help(capsys, command):
    assert main([command]) == 2
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: lanewise {command} ")
    assert main([command, "--help"]) == 0
    assert capsys.readouterr().out == shown
