"""A fork does what `python -m` does as if its client had started it, and outlives neither of its makers."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path

import pytest

from lanewise.errors import LaunchError
from lanewise.launch import fork_server
from lanewise.launch.fork_client import ForkClient, fork_client
from tests.patience import patient

module = sys.modules["lanewise.launch.fork_client"]  # the package has a function of that name

MODULES = {
    "say": """
import json, os, signal, sys
import numpy
print(json.dumps({
    "arguments": sys.argv[1:],
    "name": __name__,
    "cwd": os.getcwd(),
    "greeting": os.environ.get("GREETING"),
    "has interrupts": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
    "blocked signals": len(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "leads a session": os.getsid(0) == os.getpid(),
    "draw": numpy.random.rand(),
}))
print("beside", file=sys.stderr)
sys.exit(int(sys.argv[1]))
""",
    "sleeping": "import time; print('here', flush=True); time.sleep(600)",
    "failing": "1 / 0",
    "with_children": """
import os, subprocess, sys, time
child = subprocess.Popen(["sleep", "600"])
group = subprocess.Popen(["sleep", "600"], process_group=0)
if (fork := os.fork()) == 0:
    time.sleep(600)
apart = subprocess.Popen(["sleep", "600"], start_new_session=True)
print(child.pid, group.pid, fork, apart.pid, flush=True)
os._exit(int(sys.argv[1])) if sys.argv[1:] else time.sleep(600)
""",
    "at_exit": "import atexit; atexit.register(print, 'bye'); raise SystemExit('no')",
    "forking": """
import os
from lanewise.launch import fork_client
fork = fork_client({}).run("say", ["3"], environment=os.environ)
raise SystemExit(fork.wait(60))
""",
}


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """The environment of an interpreter that finds the modules above."""
    folder = tmp_path_factory.mktemp("modules")
    for name, source in MODULES.items():
        (folder / f"{name}.py").write_text(source)
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": "default"}


@pytest.fixture(scope="module")
def server(environment):
    started = ForkClient.start(environment, ["numpy"])
    yield started
    started.end()


def run(server, folder, module, *arguments, **options):
    """Run a module to its end, and return its exit code and what it wrote."""
    with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
        fork = server.run(module, arguments, streams=(0, out.fileno(), err.fileno()), **options)
        code = fork.wait(patient(60))
    return code, (folder / "out").read_text(), (folder / "err").read_text()


def is_running(pid: int) -> bool:
    with suppress(FileNotFoundError, ProcessLookupError):
        stat = Path(f"/proc/{pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[0] not in "ZX"  # a zombie waits for init, which may not care
    return False


def has_ended(pid: int) -> bool:
    deadline = time.monotonic() + patient(60)
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not is_running(pid)


def test_a_fork_is_as_if_its_client_had_started_it(server, environment, tmp_path):
    given = {**environment, "GREETING": "hello"}
    draws = set()
    for code in (0, 7):
        ended, out, err = run(server, tmp_path, "say", str(code), environment=given, cwd=str(tmp_path))
        assert (ended, err) == (code, "beside\n")
        said = json.loads(out)
        draws.add(said.pop("draw"))
        assert said == {
            "arguments": [str(code)],
            "name": "__main__",
            "cwd": str(tmp_path),
            "greeting": "hello",
            "has interrupts": True,
            "blocked signals": 0,
            "leads a session": True,
        }
    assert len(draws) == 2  # numpy draws a seed when it is imported, which the server did


def test_an_error_is_shown_as_python_shows_it(server, environment, tmp_path):
    code, out, err = run(server, tmp_path, "failing", environment=environment)
    assert (code, out) == (1, "")
    assert err.endswith("ZeroDivisionError: division by zero\n")
    assert run(server, tmp_path, "at_exit", environment=environment) == (1, "bye\n", "no\n")


def test_a_signal_that_ends_a_fork_is_its_exit_code(server, environment):
    fork = server.run("sleeping", [], environment=environment)
    assert fork.poll() is None
    assert fork.wait(0.01) is None
    fork.send_signal(signal.SIGTERM)  # may come before the fork has done anything
    assert fork.wait(patient(60)) == -signal.SIGTERM
    fork.send_signal(signal.SIGTERM)


def test_a_fork_ends_when_nobody_waits_for_it(server, environment):
    fork = server.run("sleeping", [], environment=environment)
    fork.connection.close()
    assert has_ended(fork.pid)


def test_a_fork_whose_client_is_gone_before_it_said_what_to_run_ends_without_a_word(server, tmp_path):
    """A signal to a launcher does that; a socket that is closed with something unread in it is reset."""
    ours, theirs = socket.socketpair()
    errors = tmp_path / "errors"
    with errors.open("w") as stderr, ours, theirs:
        socket.send_fds(server._channel, [fork_server.RUN], [theirs.fileno(), *[stderr.fileno()] * 3])
        assert wait([ours], patient(60))
        pid = fork_server.NUMBER.unpack(ours.recv(fork_server.NUMBER.size, socket.MSG_PEEK))[0]
        os.kill(server.pid, signal.SIGSTOP)  # else it may kill the fork before that says a word
    try:
        assert has_ended(pid)
    finally:
        os.kill(server.pid, signal.SIGCONT)
    assert errors.read_text() == ""


def start_with_children(server, environment, *arguments):
    """Return a fork, the processes that it started in its session, and one that left that session."""
    read, write = os.pipe()
    with os.fdopen(read) as lines:
        fork = server.run("with_children", arguments, environment=environment, streams=(0, write, 2))
        os.close(write)
        *children, apart = map(int, lines.readline().split())
    return fork, children, apart


@pytest.mark.parametrize("code", [3, 0])
def test_what_a_fork_started_ends_with_it_if_it_fails(server, environment, code):
    fork, children, apart = start_with_children(server, environment, str(code))
    assert fork.wait(patient(60)) == code
    if code:
        assert [has_ended(pid) for pid in children] == [True] * 3
    for pid in (apart, *(() if code else children)):
        os.kill(pid, signal.SIGKILL)  # still there


@pytest.mark.parametrize(
    "way", ["the fork is killed", "nobody waits", "the server ends", "the server is killed"]
)
def test_what_a_fork_started_ends_when_it_is_killed(environment, way):
    server = ForkClient.start(environment, [])
    fork, children, apart = start_with_children(server, environment)
    if way == "the fork is killed":
        os.kill(fork.pid, signal.SIGKILL)
    elif way == "nobody waits":
        fork.connection.close()
    elif way == "the server ends":
        server.end()
    else:
        os.kill(server.pid, signal.SIGKILL)
    if way != "nobody waits":
        assert fork.wait(patient(60)) == -signal.SIGKILL
    assert [has_ended(pid) for pid in (fork.pid, *children)] == [True] * 4
    os.kill(apart, signal.SIGKILL)
    server.end()


def test_a_server_that_is_stopped_ends_nevertheless(environment):
    server = ForkClient.start(environment, [])
    fork = server.run("sleeping", [], environment=environment)
    os.kill(server.pid, signal.SIGSTOP)
    server.end()
    assert fork.wait(patient(60)) == -signal.SIGKILL
    assert has_ended(fork.pid)


def test_forks_end_with_their_server(environment):
    server = ForkClient.start(environment, [])
    fork = server.run("sleeping", [], environment=environment)
    os.kill(server.pid, signal.SIGKILL)
    assert fork.wait(patient(60)) == -signal.SIGKILL
    assert has_ended(fork.pid)
    with pytest.raises(LaunchError, match="that workers are forked from was killed"):
        server.require_running()
    with pytest.raises(LaunchError, match="that workers are forked from was killed"):
        server.run("say", ["0"], environment=environment)
    server.end()


def test_a_server_that_is_stopped_is_noticed_where_it_has_something_to_tell(environment, monkeypatch):
    monkeypatch.setattr(module, "SECONDS_BETWEEN_CHECKS", 0.05)
    server = ForkClient.start(environment, [])
    fork, other = (server.run("sleeping", [], environment=environment) for _ in range(2))
    os.kill(server.pid, signal.SIGSTOP)
    connections = [fork.connection, other.connection]
    for _ in range(15):
        assert not server.wait(connections, [fork, other])  # both run, so it has nothing to tell
    os.kill(other.pid, signal.SIGKILL)

    def wait_for_word() -> None:
        while not server.wait(connections, [fork, other]):
            pass

    with pytest.raises(LaunchError, match=rf"\(process {server.pid}\), which is stopped \(SIGSTOP\), has"):
        wait_for_word()
    assert has_ended(fork.pid)
    assert fork.wait(patient(60)) == other.wait(patient(60)) == -signal.SIGKILL


def test_a_server_that_is_stopped_before_it_forks_is_noticed(environment, monkeypatch):
    monkeypatch.setattr(module, "SECONDS_BETWEEN_CHECKS", 0.05)
    server = ForkClient.start(environment, [])
    os.kill(server.pid, signal.SIGSTOP)
    with pytest.raises(LaunchError, match="which is stopped"):
        server.run("sleeping", [], environment=environment)
    assert not server.is_running()


@pytest.mark.parametrize("in_thread", [False, True])
def test_a_server_ends_with_its_parent_but_not_with_the_thread_that_started_it(environment, in_thread):
    script = f"""
import os, threading, time
from lanewise.launch import fork_server
from lanewise.launch.fork_client import ForkClient
def start():
    global server, fork
    server = ForkClient.start(os.environ, [])
    fork = server.run("sleeping", [], environment=os.environ)
if {in_thread}:
    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
else:
    start()
time.sleep(0.2)
print(server.pid, fork.pid, fork.poll(), flush=True)
time.sleep(600)
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True
    ) as parent:
        lines = {parent.stdout.readline().strip() for _ in range(2)}
        (said,) = lines - {"here"}
        server_pid, fork_pid, code = said.split()
        assert code == "None"
        parent.kill()
    assert has_ended(int(fork_pid))
    assert has_ended(int(server_pid))


def test_a_fork_that_starts_processes_takes_them_from_the_same_server(server, environment, tmp_path):
    code, out, _ = run(server, tmp_path, "forking", environment=environment)
    assert code == 3
    assert json.loads(out)["name"] == "__main__"


def test_there_is_a_server_for_each_set_of_values_that_are_read_at_the_start(monkeypatch):
    one = fork_client({"OMP_NUM_THREADS": "7"})
    monkeypatch.setenv("GREETING", "hello")
    assert fork_client({"OMP_NUM_THREADS": "7"}) is one
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert fork_client({}) is one
    monkeypatch.setenv("PYTHONHASHSEED", "5")
    other = fork_client({})
    assert other is not one
    one.end()
    other.end()


def test_modules_that_cannot_be_imported_are_left_out(environment, tmp_path):
    server = ForkClient.start(environment, ["no_such_module", "failing"])
    server.preload("failing")
    assert run(server, tmp_path, "say", "0", environment=environment)[0] == 0
    server.end()


def test_forks_may_be_started_from_several_threads(server, environment, tmp_path):
    codes = {}

    def start(number: int) -> None:
        folder = tmp_path / str(number)
        folder.mkdir()
        codes[number] = run(server, folder, "say", str(number), environment=environment)[0]

    threads = [threading.Thread(target=start, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert codes == {number: number for number in range(4)}
