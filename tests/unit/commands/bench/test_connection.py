"""Messages between a process that is measured and the one that measures."""

import socket
from contextlib import closing

import pytest

from lanewise.commands.bench.connection import JsonConnection, listen


def test_messages_arrive_one_by_one_until_the_other_end_has_gone():
    ends = [JsonConnection(one) for one in socket.socketpair()]
    assert not ends[1].has_come(0)
    ends[0].send({"a": [1, None]})
    ends[0].send("two")
    assert ends[1].has_come(1)
    assert [ends[1].receive(), ends[1].receive()] == [{"a": [1, None]}, "two"]
    ends[0].close()
    assert ends[1].has_come(1)
    with pytest.raises(EOFError):
        ends[1].receive()
    with pytest.raises(BrokenPipeError):
        ends[1].send(1)
    ends[1].close()


def test_an_address_may_be_longer_than_that_of_a_socket(tmp_path):
    """Folders for temporary files on a cluster are."""
    folder = tmp_path / ("a" * 60) / ("b" * 60)
    folder.mkdir(parents=True)
    with listen(folder / "x", 1) as listener, closing(JsonConnection.to(folder / "x")) as there:
        here = JsonConnection(listener.accept()[0])
        there.send(1)
        assert here.receive() == 1
        here.close()
