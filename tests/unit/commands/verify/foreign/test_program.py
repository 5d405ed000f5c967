"""The command line of an observed program."""

import pytest

from lanewise.commands.verify.foreign.program import ObservedProgram
from lanewise.errors import ConfigError


def test_placeholders_are_filled_in(tmp_path):
    command = ["python", "train.py", "--rows={per_process:64}", "{folder}/x", "{processes}", "{other}"]
    program = ObservedProgram(command, tmp_path, 4)
    assert program.arguments(4, tmp_path / "own") == [
        *("python", "train.py", "--rows=16", f"{tmp_path}/own/x", "4", "{other}")
    ]


def test_what_cannot_be_divided_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"\{per_process:64\} cannot be divided by 3 processes. Use a mult"):
        ObservedProgram(["python", "{per_process:64}"], tmp_path, 4).arguments(3, tmp_path)


@pytest.mark.parametrize(("command", "said"), [([], "got none"), (["/bin/torchrun", "x.py"], "got torchrun")])
def test_a_command_that_is_none_or_a_launcher_is_refused(tmp_path, command, said):
    with pytest.raises(ConfigError, match=said):
        ObservedProgram(command, tmp_path, 4)


def test_a_program_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no-such-program cannot be started: No such file"):
        ObservedProgram(["no-such-program"], tmp_path, 4).run(1, "1")
