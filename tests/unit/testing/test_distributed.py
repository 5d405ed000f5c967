"""run_distributed: real processes, their results in order, their errors, and nothing left behind."""

import multiprocessing
import os
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lanewise.launch import fork_client
from lanewise.processes.world.world import GroupWorld, LocalWorld, World
from lanewise.testing import run_distributed
from tests.listening import addresses
from tests.patience import patient
from tests.slow import slow


def is_running(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"  # a zombie waits for init, which may not care


def describe(world: World, factor: int, name: str):
    time.sleep(0.1 * (world.world_size - world.rank))  # rank 0 ends last
    return name, factor * world.rank, world.world_size, world.all_gather_tree(os.getpid())


def test_results_come_in_rank_order():
    results = run_distributed(describe, 3, 10, "lane")
    assert [result[:3] for result in results] == [("lane", 0, 3), ("lane", 10, 3), ("lane", 20, 3)]
    pids = results[0][3]
    assert [result[3] for result in results] == [pids] * 3
    assert len({*pids, os.getpid()}) == 4


def starts_a_server_of_its_own(world: World):
    return fork_client({})._process is not None


def test_a_process_launches_others_from_the_server_that_it_comes_from():
    """In a worker of xdist the environment had a path twice: each run of several processes imported torch."""
    assert run_distributed(starts_a_server_of_its_own, 1) == [False]


def what_i_am(world: World):
    return type(world), dist.is_initialized(), world.device.type, torch.get_num_threads()


def test_one_process_gets_a_local_world():
    assert run_distributed(what_i_am, 1) == [(LocalWorld, False, "cpu", 1)]


def test_several_processes_get_a_group():
    assert run_distributed(what_i_am, 2) == [(GroupWorld, True, "cpu", 1)] * 2


def where_i_listen(world: World) -> set[str]:
    world.all_gather_tree(None)
    return addresses([os.getpid()])


def test_only_this_machine_can_call():
    assert run_distributed(where_i_listen, 2) == [{"127.0.0.1"}] * 2


def end_at_once(world: World) -> int:
    if world.rank == 0:
        time.sleep(0.1)
    return world.rank


@pytest.mark.parametrize("_", [0, *slow(1, 2, 3, 4)])
def test_a_rank_may_end_before_the_others_begin(_):
    assert run_distributed(end_at_once, 4) == [0, 1, 2, 3]


def add_up(world: World, value: torch.Tensor) -> torch.Tensor:
    total = value * (world.rank + 1)
    dist.all_reduce(total)
    return total


def test_tensors_travel_both_ways():
    for total in run_distributed(add_up, 2, torch.tensor([1.0, 2.0])):
        assert torch.equal(total, torch.tensor([3.0, 6.0]))


def large(world: World, num_bytes: int) -> bytes:
    return bytes(num_bytes)


def test_a_result_may_be_larger_than_a_pipe():
    assert [len(result) for result in run_distributed(large, 2, 1_000_000)] == [1_000_000] * 2


def fail_on(world: World, failing_rank: int):
    if world.rank == failing_rank:
        raise ValueError(f"no lane for {world.rank}")
    world.all_gather_tree(None)  # waits for the one that failed


@pytest.mark.parametrize("rank", [0, 1])
def test_the_traceback_of_the_rank_that_failed_is_shown(rank):
    with pytest.raises(RuntimeError) as caught:
        run_distributed(fail_on, 2, rank)
    message = str(caught.value)
    assert message.startswith(f"rank {rank} failed:\nTraceback (most recent call last):\n")
    assert "in fail_on\n" in message
    assert message.endswith(f"ValueError: no lane for {rank}\n")


def return_what_cannot_travel(world: World):
    return lambda: None


def test_a_result_that_cannot_travel_is_that_ranks_error():
    with pytest.raises(RuntimeError, match=r"(?s)rank 0 failed:\nTraceback .*return_what_cannot_travel"):
        run_distributed(return_what_cannot_travel, 1)


def vanish(world: World):
    if world.rank == 1:
        os._exit(3)
    time.sleep(60)


def test_a_rank_that_vanishes_is_named():
    with pytest.raises(RuntimeError, match="rank 1 ended without a result"):
        run_distributed(vanish, 2)


def sleep(world: World, folder: Path, sleeping_ranks: list[int]):
    (folder / str(os.getpid())).touch()
    if world.rank in sleeping_ranks:
        time.sleep(3600)  # longer than any limit


def pids_in(folder: Path) -> list[int]:
    return [int(path.name) for path in folder.iterdir()]


@pytest.mark.parametrize(
    ("sleeping_ranks", "seconds"),
    [([0, 1], 1.0), ([1], patient(4.0))],  # enough for rank 0 to end on a busy machine
)
def test_who_does_not_end_in_time_is_named(tmp_path, sleeping_ranks, seconds):
    start = time.monotonic()
    with pytest.raises(TimeoutError) as caught:
        run_distributed(sleep, 2, tmp_path, sleeping_ranks, timeout_seconds=seconds)
    assert str(caught.value) == f"ranks {sleeping_ranks} did not end within {seconds} s"
    assert seconds <= time.monotonic() - start < 3600  # which they would sleep
    assert not [pid for pid in pids_in(tmp_path) if is_running(pid)]


def fail_beside_a_sleeper(world: World, folder: Path):
    (folder / str(os.getpid())).touch()
    world.all_gather_tree(None)
    if world.rank == 0:
        raise ValueError
    time.sleep(60)


def test_nothing_is_left_running_after_a_failure(tmp_path):
    before = multiprocessing.active_children()  # of tests that ran in this process, loaders for instance
    with pytest.raises(RuntimeError, match="rank 0 failed"):
        run_distributed(fail_beside_a_sleeper, 3, tmp_path)
    assert len(pids_in(tmp_path)) == 3
    assert not [pid for pid in pids_in(tmp_path) if is_running(pid)]
    assert [child for child in multiprocessing.active_children() if child not in before] == []


def test_nothing_is_left_running_after_a_success(tmp_path):
    before = multiprocessing.active_children()
    run_distributed(sleep, 2, tmp_path, [])
    assert len(pids_in(tmp_path)) == 2
    assert not [pid for pid in pids_in(tmp_path) if is_running(pid)]
    assert [child for child in multiprocessing.active_children() if child not in before] == []


def test_what_cannot_travel_is_refused_before_anything_starts():
    with pytest.raises(TypeError, match="lock"):
        run_distributed(what_i_am, 2, threading.Lock())


def test_a_function_that_has_no_module_to_be_found_in_travels_as_a_whole():
    assert run_distributed(lambda world: world.rank, 2) == [0, 1]
