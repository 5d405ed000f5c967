"""Calls of a store that answers, one that is stopped, and one that has ended."""

import multiprocessing
import os
import signal
import socket
import threading
import time
from multiprocessing.connection import Connection

import pytest
import torch.distributed as dist

from lanewise.processes.watch import store as module
from lanewise.processes.watch.store import StoreLostError, TimedStore
from tests.patience import patient
from tests.unit.processes.watch.store import make_store


def keep_store(told: Connection) -> None:
    """Keep a store in a process of its own."""
    store, port = make_store()
    told.send(port)
    time.sleep(600)
    del store


def test_values_and_numbers_are_kept():
    store, _ = make_store()
    timed = TimedStore(store, "here")
    assert not timed.has("a")
    timed.set("a", "b")
    assert timed.has("a")
    assert not timed.has("a", "c")
    assert timed.get("a") == b"b"
    assert [timed.add("n"), timed.add("n", 2), timed.add("n", 0)] == [1, 3, 3]


def test_a_store_that_was_closed_has_no_thread_and_no_port():
    """A process that starts workers again and again would keep a server for each time."""
    store, port = make_store()
    timed = TimedStore(store, "here")
    timed.set("a", "b")
    before = [thread for thread in threading.enumerate() if thread.name == "store"]
    timed.close()
    del store, timed
    deadline = time.monotonic() + patient(60)
    while time.monotonic() < deadline and any(thread.is_alive() for thread in before[-1:]):
        time.sleep(0.01)
    assert not before[-1].is_alive()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


def test_a_store_that_is_stopped_is_not_waited_for_and_one_that_ended_is_named(monkeypatch):
    """Torch's own client waits for ever in `check`, whatever its timeout."""
    ours, theirs = multiprocessing.Pipe()
    keeper = multiprocessing.get_context("fork").Process(target=keep_store, args=(theirs,), daemon=True)
    keeper.start()
    try:
        port = ours.recv()
        timed = TimedStore(dist.TCPStore("127.0.0.1", port, is_master=False), f"127.0.0.1:{port}")
        timed.set("a", "b")
        os.kill(keeper.pid, signal.SIGSTOP)
        os.waitpid(keeper.pid, os.WUNTRACED)
        monkeypatch.setattr(module, "_SECONDS_FOR_AN_ANSWER", 0.3)
        start = time.monotonic()
        with pytest.raises(StoreLostError, match=f"127.0.0.1:{port} does not answer") as lost:
            timed.has("a")
        assert not lost.value.has_ended
        monkeypatch.setattr(module, "_SECONDS_FOR_AN_ANSWER", 3600.0)
        with pytest.raises(StoreLostError):
            timed.add("n")  # which does not wait for an answer again
        assert time.monotonic() - start < 1800
        monkeypatch.setattr(module, "_SECONDS_TO_RECOVER", 3600.0)
        os.kill(keeper.pid, signal.SIGCONT)
        assert timed.get("a") == b"b"
    finally:
        keeper.kill()
    keeper.join()
    with pytest.raises(StoreLostError, match="is lost: that process has ended") as lost:
        timed.has("a")
    assert lost.value.has_ended
