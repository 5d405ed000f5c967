"""Processes that meet, in one start of a world and in the next."""

from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from lanewise.errors import WorldError
from lanewise.processes.watch import meeting as module
from lanewise.processes.watch.meeting import Meeting
from lanewise.processes.watch.store import OWN_STORE_VARIABLE
from tests.listening import reserve_port
from tests.unit.processes.watch.store import make_environment, make_store


@pytest.fixture(autouse=True)
def _forgets() -> None:
    forget()


def forget() -> None:
    """Forget the meetings of a process, as the next start does, which is another process."""
    module._stores.clear()


def meet(port: int, rank: int, world_size: int, seconds: float = 20.0, **further: bool) -> tuple[int, bool]:
    meeting = Meeting(make_environment(port, rank, world_size, **further), seconds)
    is_restarted = meeting.wait()
    return meeting.channel.start, is_restarted


def meet_all(port: int, world_size: int, order=None, **further: bool) -> list[tuple[int, bool]]:
    """Meet in a start with fresh processes."""
    forget()
    return meet_again(port, world_size, order, **further)


def meet_again(port: int, world_size: int, order=None, **further: Any) -> list[tuple[int, bool]]:
    """Meet in the same processes."""
    with ThreadPoolExecutor(world_size) as threads:
        started = {
            rank: threads.submit(meet, port, rank, world_size, **further)
            for rank in order or range(world_size)
        }
        return [started[rank].result() for rank in range(world_size)]


def test_each_start_has_a_number_and_the_second_one_knows_that_it_is_not_the_first():
    _store, port = make_store()
    assert meet_all(port, 3) == [(1, False)] * 3
    assert meet_all(port, 3, order=[2, 1, 0]) == [(2, True)] * 3


def test_a_start_with_more_or_fewer_processes_is_a_new_one():
    _store, port = make_store()
    assert meet_all(port, 2) == [(1, False)] * 2
    assert meet_all(port, 4, order=[3, 2, 1, 0]) == [(2, True)] * 4
    assert meet_all(port, 1) == [(3, True)]


@pytest.mark.parametrize("knowing", [0, 1])
def test_the_word_of_any_launcher_counts(knowing):
    """Torch's agents count restarts each for itself, and one that joins later, as rank 0 too, begins at 0:
    the run in its folder was taken for another one, which ended the run with exit code 2."""
    _store, port = make_store()
    with ThreadPoolExecutor(2) as threads:
        one = threads.submit(meet, port, 1, 2, is_restarted=knowing == 1)
        assert meet(port, 0, 2, is_restarted=knowing == 0) == (1, True)
        assert one.result() == (1, True)


def test_a_rank_that_came_to_a_start_whose_rank_0_is_gone_comes_to_the_next():
    store, port = make_store()
    store.add("starts", 1)  # its rank 0 ended before all had come
    with ThreadPoolExecutor(1) as threads:
        one = threads.submit(meet, port, 1, 2)
        while not store.check(["1/arrived/1"]):
            pass
        assert meet(port, 0, 2) == (2, True)
        assert one.result() == (2, True)


def test_those_that_do_not_come_are_named():
    _store, port = make_store()
    with pytest.raises(WorldError, match=r"ranks 1, 2 did not come .* distributed.start_seconds=0.3"):
        meet(port, 0, 3, seconds=0.3)
    _store, port = make_store()
    with pytest.raises(WorldError, match="rank 0 did not come"):
        meet(port, 1, 2, seconds=0.3)


@pytest.mark.parametrize(("terminal", "lines"), [(0, 1), (7, 0)])
def test_a_rank_that_waits_says_so_once_on_each_terminal(monkeypatch, capsys, terminal, lines):
    """Whoever started the first host and not yet the second looked at a terminal that seemed to hang."""
    monkeypatch.setattr(module, "_SECONDS_UNTIL_TOLD", -1.0)
    _store, port = make_store()
    with pytest.raises(WorldError, match="did not come"):
        meet(port, 0, 3, seconds=0.3, terminal=terminal)
    place = f"127.0.0.1:{port}, which torchrun's agent keeps, for up to distributed.start_seconds=0.3"
    said = f"rank 0 waits for ranks 1, 2 at the store at {place}\n"
    assert capsys.readouterr().err == said * lines


def test_a_rank_that_does_not_reach_the_store_says_so(monkeypatch):
    """Torch's call waits for the host of rank 0, and a terminal shows nothing meanwhile."""
    lines: SimpleQueue[str] = SimpleQueue()

    def wait_for_store(*_args: Any, **_further: Any) -> None:
        raise dist.DistError(f"during it: {lines.get(timeout=100)}")

    monkeypatch.setattr(module, "_SECONDS_UNTIL_TOLD", 0.0)
    monkeypatch.setattr(module.dist, "TCPStore", wait_for_store)
    monkeypatch.setattr(module.sys, "stderr", SimpleNamespace(write=lines.put))
    place = "127.0.0.1:29400, which rank 0 keeps, for up to distributed.start_seconds=1800"
    said = f"during it: rank 3 waits for rank 0, which waits for all, at the store at {place}"
    with pytest.raises(WorldError, match=said):
        Meeting(make_environment(29400, 3, 4, terminal=3, has_agent_store=False), 1800.0)


def test_a_rank_that_waits_at_the_store_of_an_agent_names_the_variable(monkeypatch, capsys):
    """An agent that stayed while hosts came and went kept its store, and rank 0 another one: both waited for
    half an hour, and neither said why."""
    monkeypatch.setattr(module, "_SECONDS_UNTIL_TOLD", -1.0)
    _store, port = make_store()
    with pytest.raises(WorldError, match="rank 0 did not come"):
        meet(port, 1, 2, seconds=0.3, terminal=1)
    said = capsys.readouterr().err
    assert "If hosts came or went" in said
    assert f"{OWN_STORE_VARIABLE}=1" in said


def test_a_port_that_something_else_has_is_named():
    _store, port = make_store()
    said = f"there is no store at 127.0.0.1:{port}, where processes meet: .*EADDRINUSE"
    with pytest.raises(WorldError, match=said):
        Meeting(make_environment(port, 0, 2, has_agent_store=False), 1.0)


def test_what_rank_0_chose_in_the_first_start_is_what_all_get_in_every_start():
    _store, port = make_store()

    def choose(rank: int, answer: str) -> str:
        meeting = Meeting(make_environment(port, rank, 2), 20.0)
        meeting.wait()
        return meeting.agree(lambda: answer)

    for answers in (("first", "other"), ("second", "another")):
        forget()
        with ThreadPoolExecutor(2) as threads:
            assert list(threads.map(choose, (0, 1), answers)) == ["first", "first"]
    with ThreadPoolExecutor(2) as threads:  # the next run of the same processes is another one
        assert list(threads.map(choose, (0, 1), ("third", ""))) == ["third", "third"]


def test_a_program_that_trains_several_times_begins_anew_each_time_and_rank_0_keeps_its_port():
    """The second run found its address in use; with a store of torchrun it was taken for the first one again,
    and went on with what lay in its folder."""
    port = reserve_port()
    for number in (1, 2, 3):
        assert meet_again(port, 2, has_agent_store=False, seconds=20.0 + number) == [(number, False)] * 2
    _store, port = make_store()
    assert [meet_again(port, 2)[0] for _ in range(2)] == [(1, False), (2, False)]
    assert meet_all(port, 2) == [(3, True)] * 2  # the program is started again
    assert meet_again(port, 2) == [(4, True)] * 2  # in which the second run may have begun, too
