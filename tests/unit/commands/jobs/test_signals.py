"""What a process does with a signal, before training began and afterwards."""

import os
import signal

import pytest

from lanewise.commands.jobs import signals

ALL = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
SIGNALS = pytest.mark.parametrize("sign", ALL)


@pytest.fixture(autouse=True)
def seen(monkeypatch):
    """Numbers of the signals that come to whoever was there before; none ends the tests."""
    monkeypatch.setattr(signals, "_is_watched", False)  # whatever a test of the command left in this process
    numbers = []
    before = {sign: signal.signal(sign, lambda number, _: numbers.append(number)) for sign in ALL}
    yield numbers
    for sign, handler in before.items():
        signal.signal(sign, handler)


@SIGNALS
def test_before_training_a_signal_does_what_it_did_before(sign, seen):
    with signals.watching():
        os.kill(os.getpid(), sign)
    assert seen == [sign]


def test_one_of_several_takes_the_signals_only_while_it_trains(seen):
    os.kill(os.getpid(), signal.SIGTERM)
    with signals.training():
        assert not signals.wants_stop()
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.wants_stop()
    os.kill(os.getpid(), signal.SIGTERM)
    assert seen == [signal.SIGTERM] * 2


def test_training_leaves_the_signals_to_whoever_takes_them_already(seen):
    with signals.watching():
        with signals.training():
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.wants_stop()
    assert seen == []


@SIGNALS
def test_in_training_a_signal_is_a_wish_and_a_later_one_is_not_ours(sign, seen, monkeypatch):
    with signals.watching():
        signals.begin()
        os.kill(os.getpid(), sign)
        assert signals.wants_stop()
        os.kill(os.getpid(), sign)
        assert seen == [], "Slurm may send it twice"
        monkeypatch.setattr(signals, "_SECONDS_OF_ONE", 0)
        os.kill(os.getpid(), sign)
        assert seen == [sign]
    os.kill(os.getpid(), sign)
    assert seen == [sign, sign]


def test_a_launcher_tells_its_workers_by_a_file_once_they_have_begun(tmp_path, monkeypatch):
    monkeypatch.setattr(signals, "_stop_file", None)
    file = tmp_path / "job.stop"
    with signals.watching():
        signals.pass_on(file)
        file.with_suffix(".begun").touch()  # what `begin` does in a worker
        os.kill(os.getpid(), signal.SIGTERM)
    assert file.exists()
