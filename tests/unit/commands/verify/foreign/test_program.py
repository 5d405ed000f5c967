"""The command line of an observed program, what it prints, and its end."""

import os
import signal
import sys
import threading
import tracemalloc

import pytest

from lanewise.commands.verify.foreign.program import ObservedProgram
from lanewise.errors import ConfigError
from lanewise.launch.launcher import ending_on
from lanewise.processes.watch.channel import until
from lanewise.processes.watch.process import ENDED, process_table, state_of


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


PRINTS = "import sys; sys.stdout.write('x\\n' * 2**22 + '\\x1b[2Jlast\\rerror: forged\\n'); sys.exit(3)"


def test_of_a_program_that_fails_the_last_lines_are_shown_and_no_more_is_held(tmp_path):
    """All was read: 1.5 GB took 3.2 GB. Escape sequences cleared the terminal."""
    tracemalloc.start()
    noted, said = ObservedProgram([sys.executable, "-c", PRINTS], tmp_path, 4)._run(
        1, tmp_path, None, is_plain=True
    )
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert noted == []
    assert "ended with code 3, and no update of an optimizer was seen" in said
    assert most < 2**22
    assert said.splitlines()[-3:] == ["  x", "  \\x1b[2Jlast", "  error: forged"]


STAYS = "import subprocess, sys; subprocess.run(['sh', '-c', f'echo $$ > {sys.argv[1]}; exec sleep 100'])"


def test_a_signal_ends_a_program_with_what_it_started(tmp_path):
    started = tmp_path / "started"
    program = ObservedProgram([sys.executable, "-c", STAYS, str(started)], tmp_path, 4)

    def stop():
        until(lambda: started.exists() and started.read_text().endswith("\n"), 60.0)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop, daemon=True).start()
    with pytest.raises(SystemExit, match="143"), ending_on((signal.SIGTERM,)):
        program.run(1, "1")
    pid = int(started.read_text())
    assert until(lambda: state_of(pid, process_table()) == ENDED, 10.0)
