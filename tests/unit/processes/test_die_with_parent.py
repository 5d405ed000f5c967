"""A process ends with its parent, however either of them started."""

import ast
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lanewise.processes.die_with_parent import die_with_parent
from tests.patience import patient

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's help is Linux's")

TIE = """
import sys
from lanewise.processes.die_with_parent import die_with_parent
die_with_parent(*map(int, sys.argv[1:]))
print('alive', flush=True)
"""


def run(script: str, parent_pid: int | None) -> subprocess.CompletedProcess[str]:
    arguments = [] if parent_pid is None else [str(parent_pid)]
    return subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=False
    )


def is_running(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"  # a zombie waits for init, which may not care


def has_ended(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not is_running(pid)


@pytest.mark.parametrize("is_named", [True, False])
def test_a_child_of_a_living_parent_lives(is_named):
    done = run(TIE, os.getpid() if is_named else None)
    assert (done.returncode, done.stdout) == (0, "alive\n")


def test_a_child_of_a_parent_that_is_gone_ends_itself():
    with subprocess.Popen(["true"]) as gone:
        pass
    done = run(TIE, gone.pid)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "")


def test_a_child_that_was_handed_to_another_process_ends_itself():
    done = run(TIE, os.getppid())  # the parent is this process
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "")


STARTER = f"""
import subprocess, sys, time

tie = {TIE!r}
stay = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
subprocess.Popen([sys.executable, "-c", tie + stay])
time.sleep(60)
"""


def test_a_child_dies_with_its_parent():
    with subprocess.Popen([sys.executable, "-c", STARTER], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout.readline() == "alive\n"
        child = int(parent.stdout.readline())
        assert is_running(child)
        parent.send_signal(signal.SIGKILL)
    assert has_ended(child, patient(60))


def test_a_child_of_multiprocessing_knows_its_parent():
    child = multiprocessing.get_context("fork").Process(target=die_with_parent)
    child.start()
    child.join()
    assert child.exitcode == 0


ORPHANING = """
import multiprocessing, os, time
from lanewise.processes.die_with_parent import die_with_parent

def outlive(parent):
    print(os.getpid(), flush=True)
    while os.getppid() == parent:
        time.sleep(0.01)
    die_with_parent()
    print("alive", flush=True)

multiprocessing.get_context("fork").Process(target=outlive, args=(os.getpid(),)).start()
os._exit(0)
"""


def test_a_child_of_multiprocessing_whose_parent_is_gone_ends_itself():
    done = run(ORPHANING, None)  # waits for all who hold its standard output
    assert done.returncode == 0
    assert done.stdout.split()[1:] == []
    assert has_ended(int(done.stdout), patient(60))


SESSION = """
import os, subprocess, sys
from lanewise.processes.die_with_parent import end_session
with subprocess.Popen(["sleep", "600"]) as child:
    end_session(os.getpid())
    if child.poll() is None and os.getsid(0) != os.getpid():
        child.kill()
    print(child.wait(), os.getsid(0) == os.getpid(), flush=True)
"""


@pytest.mark.parametrize("leads", [True, False])
def test_a_process_ends_the_others_of_the_session_that_it_leads(leads):
    with subprocess.Popen(["sleep", "600"]) as stranger:
        done = subprocess.run(
            [sys.executable, "-c", SESSION],
            capture_output=True,
            text=True,
            check=True,
            start_new_session=leads,
        )
        assert stranger.poll() is None
        stranger.kill()
    assert done.stdout == f"{-signal.SIGKILL} {leads}\n"


NAMING = """
import ast
import multiprocessing
import os
from pathlib import Path
from lanewise.processes.die_with_parent import find_command_line, name_child, name_process
environment = Path('/proc/self/environ').read_bytes()
find_command_line()
os.environ.clear()  # as in a fork of the server
name_process('lanewise: rank 1 of 2, runs/\\udcff')
print(Path('/proc/self/cmdline').read_text().rstrip(chr(0)), flush=True)
if (child := os.fork()) == 0:
    name_child('loader 0')
    print(Path('/proc/self/cmdline').read_text().rstrip(chr(0)), flush=True)
    os._exit(0)
os.waitpid(child, 0)
assert Path('/proc/self/environ').read_bytes() == environment
assert 'SPT_NOENV' not in os.environ
"""


def test_a_process_and_its_child_are_shown_under_their_titles():
    done = run(NAMING, None)
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "lanewise: rank 1 of 2, runs/?",
        "loader 0 of lanewise: rank 1 of 2, runs/?",
    ]


def test_a_title_takes_no_more_than_the_room_of_the_command_line():
    script = "from lanewise.processes.die_with_parent import name_process; name_process('x' * 10**5)"
    done = run(f"{script}; print(len(open('/proc/self/cmdline').read()))", None)
    assert 20 < int(done.stdout) < 1000


def test_a_process_that_is_not_named_shows_its_whole_command_line():
    """It lost the last character, and what was between the arguments: `--devices 12` was `--devices 1`."""
    script = "import lanewise.processes.die_with_parent; print(repr(open('/proc/self/cmdline').read()))"
    done = run(script, None)
    assert ast.literal_eval(done.stdout).split("\0")[-2] == script
