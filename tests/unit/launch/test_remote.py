"""What other hosts say, on the terminal of the one that started them, and what starts again after a loss."""

import json
import os
import pty
from dataclasses import asdict, replace

import pytest

from lanewise.errors import ConfigError, LaunchError, PreemptedError
from lanewise.launch import JobFiles, Workers
from lanewise.launch import remote as module
from lanewise.launch.host import MARK
from lanewise.launch.membership import Elastic
from lanewise.launch.remote import RemoteLauncher, _write
from lanewise.launch.wire import Wire
from lanewise.processes.watch.failure import Failure
from tests.unit.launch.scripted import HELLO, PROJECT, Scripted, answering, say_hello

ANSWERS = {"enter": ["", ""], "compare": [], "open_store": 1024}
ENDED = b'["ended", null, null]'
AWAY = "ssh ended with exit code 255: No route to host"


class Gone(Wire):
    """A host that is not there."""

    remedy = "`ssh gpu1 true` must succeed."

    def __init__(self):
        self.errors = iter([b"No route to host"])

    def send(self, line):
        pass

    def read(self):
        return b""

    def read_error(self):
        return next(self.errors, b"")

    def close(self):
        pass

    def why_ended(self):
        return "ssh ended with exit code 255"


class Launcher(RemoteLauncher):
    """Finds other things at each start."""

    def __init__(self, *wires, start_seconds=60.0, sources=()):
        super().__init__(replace(PROJECT, start_seconds=start_seconds, sources=dict(sources)))
        self.wires = list(wires)

    def connect(self, names=None):
        return [("gpu1", 2, self.wires.pop(0))]

    def describe(self):
        return ""


def works(*lines: bytes, **answers: object) -> Scripted:
    """Return a host that starts workers, and then says some lines; an empty one is its end."""

    def answer(name: str) -> bytes:
        if name == "run":
            for line in lines:
                wire.say(line)
        return answering(ANSWERS | answers)(name)

    wire = Scripted(say_hello(), answer=answer)
    return wire


def run(folder, launcher: RemoteLauncher, max_restarts: int) -> JobFiles:
    files = JobFiles(folder / "job")
    files.job.touch()
    given = {"module": "", "variables": {}, "stop_variable": None, "signals": ()}
    launcher.run(Workers(max_restarts=max_restarts, **given), files)
    return files


SEEN = {
    "holds_launch": True,
    "saved_step": 4,
    "steps_lost": 2,
    "idle_seconds": 1.5,
    "pins": {},
    "pins_of_run": {},
}
STOPPED = b'["ended", null, "c3RvcA=="]'
"""The run has saved and stopped; only what is on the first host says so."""


class Hosts(RemoteLauncher):
    """Three hosts that may come and go.

    Args:
        scripts: for each start, and for each look at hosts that may join, what each host does by its name.
    """

    def __init__(self, *scripts, start_seconds=0.0):
        elastic = Elastic(
            min_hosts=2,
            max_processes=6,
            see=("see",),
            was_stopped=lambda written: written == b"stop",
            hosts=lambda: self.hosts_named,
        )
        super().__init__(replace(PROJECT, run_dir="run", start_seconds=start_seconds, elastic=elastic))
        self.hosts_named = [("a", 2), ("b", 2), ("c", 2)]
        self.scripts = list(scripts)
        self.asked = []

    def connect(self, names=None):
        self.asked.append(list(names))
        script = self.scripts.pop(0)
        return [(name, number, script[name]) for name, number in self.hosts_named if name in names]

    def describe(self):
        return ""


def member(*lines: bytes) -> Scripted:
    """Return one of several hosts, which says some lines after it has started workers; see `works`."""
    answers = {**ANSWERS, "see": SEEN, "leave": [], "find": True, "remove": None, "reach": [["", ""]] * 3}
    after_run = [b'["reply", null]', *lines]

    def answer(name: str) -> bytes:
        if name != "run":
            return answering(answers)(name)
        for line in after_run[:-1]:
            wire.say(line)
        return after_run[-1]

    wire = Scripted(say_hello(), answer=answer)
    return wire


def pair(first: Scripted, second: Scripted) -> dict[str, Scripted]:
    """Return two of three hosts."""
    for wire in (first, second):
        before = wire.answer
        wire.answer = lambda name, before=before: (
            b'["reply", [["", ""], ["", ""]]]' if name == "reach" else before(name)
        )
    return {"a": first, "b": second, "c": Gone()}


def test_a_host_that_is_lost_is_missing_in_the_next_start(tmp_path, capfd):
    three = {"a": member(b'["begun"]'), "b": member(), "c": member(b"")}
    launcher = Hosts(three, pair(member(ENDED), member(ENDED)))
    run(tmp_path, launcher, max_restarts=0)
    assert launcher.asked == [["a", "b", "c"], ["a", "b"]]
    said = capfd.readouterr().err
    costs = "after step 4 (2 steps lost, the last 1.5 s ago)"
    assert f"start with a, b {costs}; without c: its process has ended\n" in said


def test_a_host_that_is_told_to_stop_is_missing_in_the_next_start(tmp_path):
    three = {"a": member(STOPPED), "b": member(ENDED), "c": member(b'["leaves"]', b"")}
    launcher = Hosts(three, pair(member(ENDED), member(ENDED)))
    run(tmp_path, launcher, max_restarts=0)
    assert launcher.asked == [["a", "b", "c"], ["a", "b"]]


def test_too_few_hosts_that_are_left_end_the_run_in_good_order(tmp_path):
    leaves = member(b'["leaves"]', b""), member(b'["leaves"]', b"")
    with pytest.raises(PreemptedError, match="1 of at least 2 are left"):
        run(tmp_path, Hosts({"a": leaves[0], "b": leaves[1], "c": member(ENDED)}), max_restarts=0)


def test_too_few_hosts_that_come_back_end_the_run_in_good_order(tmp_path, capfd):
    gone = {"a": Gone(), "b": Gone(), "c": member()}
    launcher = Hosts({"a": member(b""), "b": member(b""), "c": member()}, gone, {**gone, "c": member()})
    with pytest.raises(PreemptedError, match=r"too few hosts can go on\. Host a: ssh ended"):
        run(tmp_path, launcher, max_restarts=0)


def test_a_host_that_can_join_lets_the_run_save_and_start_again_with_it(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(module, "_SECONDS_BETWEEN_QUESTIONS", 0.01)
    first = member(b'["begun"]')
    two = pair(first, member(ENDED))
    send = Scripted.send

    def stop(wire: Scripted, line: bytes) -> None:
        send(wire, line)
        if wire is first and json.loads(line) == ["stop"]:
            wire.say(STOPPED)

    monkeypatch.setattr(Scripted, "send", stop)
    three = {"a": member(ENDED), "b": member(ENDED), "c": member(ENDED)}
    launcher = Hosts(two, {"c": member()}, three)
    run(tmp_path, launcher, max_restarts=0)
    assert launcher.asked == [["a", "b", "c"], ["c"], ["a", "b", "c"]]
    said = capfd.readouterr().err
    assert "start with a, b after step 4" in said
    assert "saving, to start again with c\n" in said


@pytest.fixture(autouse=True)
def hurry(monkeypatch):
    monkeypatch.setattr(module, "_SECONDS_BETWEEN_TRIES", 0.0)


def test_hosts_that_are_lost_at_an_unknown_step_are_no_error_that_comes_again(tmp_path, capfd):
    launcher = Launcher(works(b""), works(b""), works(ENDED))
    run(tmp_path, launcher, max_restarts=2)
    said = capfd.readouterr().err
    assert said.count("starting again") == 2
    assert "starting again, 2 of 2 times: host gpu1: its process has ended." in said


def test_a_host_that_is_away_at_the_next_start_is_waited_for(tmp_path, capfd):
    launcher = Launcher(works(b""), Gone(), Gone(), works(ENDED))
    run(tmp_path, launcher, max_restarts=1)
    said = capfd.readouterr().err
    assert said.count(f"waiting for host gpu1: {AWAY}. `ssh gpu1 true` must succeed.") == 1


def test_a_host_that_stays_away_is_lost_and_no_mistake(tmp_path, capfd):
    launcher = Launcher(works(b""), Gone(), Gone(), start_seconds=0.0)
    with pytest.raises(LaunchError, match=rf"^host gpu1: {AWAY}\. .*\n\(rank 0 on gpu1\)$") as error:
        run(tmp_path, launcher, max_restarts=2)
    assert error.value.exit_code == 1
    assert f"starting again, 2 of 2 times: host gpu1: {AWAY}" in capfd.readouterr().err


def test_a_host_that_was_never_there_is_a_mistake(tmp_path):
    with pytest.raises(ConfigError, match=rf"^host gpu1: {AWAY}"):
        run(tmp_path, Launcher(Gone()), max_restarts=2)


def test_code_that_changed_meanwhile_is_a_mistake(tmp_path):
    changed = works(compare=["digits.py differs"])
    with pytest.raises(ConfigError, match=r"digits\.py differs"):
        run(tmp_path, Launcher(works(b""), changed), max_restarts=2)


def test_until_the_next_start_trains_nothing_can_be_saved(tmp_path):
    """So a signal ends the command at once while it waits for a host."""
    files = run(tmp_path, Launcher(works(b'["begun"]', ENDED)), max_restarts=0)
    assert files.begun.exists()
    run(tmp_path, Launcher(works(ENDED)), max_restarts=0)
    assert not files.begun.exists()


def test_a_host_that_is_lost_before_the_workers_start_is_no_mistake(tmp_path):
    wire = works()
    wire.answer = lambda name: b"" if name == "open_store" else answering(ANSWERS)(name)
    run(tmp_path, Launcher(wire, works(ENDED)), max_restarts=1)


FORGED = "fine\nerror: forged\x1b[2J\r\u2028"


def test_what_a_host_says_forges_no_error_and_commands_no_terminal(tmp_path, capfd):
    """Each text reached the terminal as it was: a new line, and what follows it looked like ours."""
    failure = Failure(
        rank=0,
        host=FORGED,
        note=(FORGED, 1, None),
        kind=FORGED,
        text=FORGED,
        shown=FORGED,
        is_ours=False,
        exit_code=1,
    )
    told = asdict(failure) | dict.fromkeys(("host", "kind", "text", "shown"), FORGED)
    hello = asdict(replace(HELLO, executable=FORGED, addresses=[("127.0.0.1", FORGED)]))
    hostile = works(json.dumps(["out", 0, 2, FORGED]).encode(), json.dumps(["ended", told, None]).encode())
    hostile._lines = Scripted(MARK.encode() + json.dumps(hello).encode())._lines
    with pytest.raises(LaunchError) as error:
        run(tmp_path, Launcher(hostile, works(json.dumps(["ended", told, None]).encode())), max_restarts=1)
    said = f"{capfd.readouterr().err}{error.value}"
    assert said.count("forged") > 5
    assert not [line for line in said.split("\n") if line.startswith("error:")]
    assert {char for char in said if not char.isprintable()} == {"\n"}


@pytest.mark.parametrize(("term", "written"), [("xterm", b"\r\033[Khost: ok\r\n"), ("dumb", b"host: ok\r\n")])
def test_a_line_takes_the_place_of_a_spinner_on_a_terminal(monkeypatch, term, written):
    monkeypatch.setenv("TERM", term)
    terminal, end = pty.openpty()
    _write(end, "host: ok")
    assert os.read(terminal, 100) == written
    os.close(end)
    os.close(terminal)


def test_a_file_gets_the_line_alone(tmp_path):
    with (tmp_path / "out").open("wb") as file:
        _write(file.fileno(), "host: ok")
    assert (tmp_path / "out").read_bytes() == b"host: ok\n"
