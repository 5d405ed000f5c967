"""What a host says is checked before anything is done with it."""

import json
from dataclasses import asdict

import pytest

from lanewise.launch.host import _SECONDS_FOR_THE_FIRST_WORD
from lanewise.launch.wire import HostError
from lanewise.processes.watch.failure import Failure
from tests.patience import patient
from tests.unit.launch.scripted import Scripted, make_host, say_hello

FAILURE = Failure.of(ValueError("boom"), rank=0)
SIGHT = (
    b'["reply", {"holds_launch": true, "saved_step": 0, "steps_lost": null, "idle_seconds": %s, '
    b'"pins": {}, "pins_of_run": {}}]'
)


@pytest.mark.parametrize(
    "line",
    [
        b"garbage",
        b"\xff\xfe",
        b"[]",
        b"{}",
        b'"beat"',
        b"[" * 100_000,
        b'["beat", 1]',
        b'[["beat"]]',
        b'["call", "enter", {}]',
        b'["out", 0, 77, "into any open descriptor"]',
        b'["out", 0, true, "x"]',
        b'["out", 2, 1, "of a rank elsewhere"]',
        b'["out", 0, 1]',
        b'["out", 0, 1, null]',
        b'["reply", null]',
        b'["refused", "what nobody asked for"]',
        b'["begun", 1]',
        b'["ended", null]',
        b'["ended", null, "no base64"]',
        b'["ended", "boom", null]',
        json.dumps(["ended", {**asdict(FAILURE), "exit_code": 0}, None]).encode(),
        json.dumps(["ended", {**asdict(FAILURE), "exit_code": True}, None]).encode(),
        json.dumps(["ended", {**asdict(FAILURE), "note": ["forward", "1", None]}, None]).encode(),
        json.dumps(["ended", {**asdict(FAILURE), "more": 1}, None]).encode(),
    ],
)
def test_what_is_no_message_ends_the_host_at_once_by_name(line):
    wire = Scripted(say_hello(), line)
    host, events = make_host(wire)
    host.wait_for_hello()
    event = events.get(timeout=_SECONDS_FOR_THE_FIRST_WORD / 2)  # long before a host counts as silent
    assert event.kind == "lost"
    assert event.values[0].startswith(
        f"it sent {line[:80]!r}, which is no message of this machine's lanewise."
    )
    assert wire.closed.wait(patient(60))


@pytest.mark.parametrize("change", [{"port": 0}, {"port": "22"}, {"addresses": [["10.0.0.1"]]}, {"extra": 1}])
def test_a_host_that_says_something_else_of_itself_is_refused(change):
    host, _ = make_host(Scripted(b"Welcome!", say_hello(**change)))
    with pytest.raises(HostError, match=r"host gpu1: it sent .* which is no message"):
        host.wait_for_hello()


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("see", SIGHT % b"NaN"),
        ("see", SIGHT % b"true"),
        ("open_store", b'["reply", 0]'),
        ("compare", b'["reply", [1]]'),
        ("enter", b'["reply", ["eth0"]]'),
        ("run", b'["reply", 1]'),
        ("find", b'["reply", "no"]'),
        ("find", b'["refused", null]'),
    ],
)
def test_an_answer_of_another_type_is_refused(name, answer):
    host, _ = make_host(Scripted(say_hello(), answer=lambda _: answer))
    host.wait_for_hello()
    with pytest.raises(HostError, match="which is no message"):
        host.call(name)


def test_what_a_host_sees_may_have_a_number():
    host, _ = make_host(Scripted(say_hello(), answer=lambda _: SIGHT % b"0.5"))
    host.wait_for_hello()
    assert host.call("see").idle_seconds == 0.5


def test_what_fits_is_passed_on():
    lines = [
        b'["beat"]',
        b'["out", 0, 2, "a line"]',
        b'["begun"]',
        json.dumps(["ended", asdict(FAILURE), "AGI="]).encode(),
    ]
    wire = Scripted(b"Welcome!", say_hello(), *lines, answer=lambda _: b'["reply", ["eth0", ""]]')
    host, events = make_host(wire)
    host.wait_for_hello()
    assert host.call("enter") == ("eth0", "")
    assert [events.get(timeout=patient(60))[1:] for _ in range(3)] == [
        ("out", [0, 2, "a line"]),
        ("begun", []),
        ("ended", [FAILURE, b"\0b"]),
    ]
    assert host.num_heard == 5


def test_only_the_first_host_has_a_result():
    host, events = make_host(Scripted(say_hello(), b'["ended", null, "AGI="]'), first_rank=2)
    host.wait_for_hello()
    assert events.get(timeout=patient(60)).kind == "lost"


def test_a_host_that_is_too_busy_to_answer_is_told_so_without_names_of_ours(monkeypatch):
    monkeypatch.setattr("lanewise.launch.wire._SECONDS_TO_ANSWER", 0.01)
    wire = Scripted(say_hello())
    wire.answer = lambda _: wire.read()  # until something is said
    host, _ = make_host(wire)
    host.wait_for_hello()
    with pytest.raises(HostError, match=r"it did not answer within 0\.01 s: it is very busy or stopped$"):
        host.call("open_store", address="127.0.0.1")
    wire.say(b"")
