"""Messages between a process that is measured and the one that measures."""

import socket

import pytest

from lanewise.bench.connection import JsonConnection


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
