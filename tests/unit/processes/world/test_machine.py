"""Local rank 0 of each machine runs a block first, and the others after it, or not at all if it failed."""

import os
import time
from pathlib import Path

import pytest
import torch.distributed as dist

import lanewise
from lanewise.errors import WorldError
from lanewise.processes.world.machine import local_rank_zero_first
from lanewise.testing import run_distributed


def be(rank: int, world_size: int, local_world_size: int) -> None:
    """Say what torchrun would say."""
    place = {
        "RANK": rank,
        "LOCAL_RANK": rank % local_world_size,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": local_world_size,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": 1,
    }
    os.environ.update({name: str(value) for name, value in place.items()})


def download(world, local_world_size: int, folder: str) -> list[str]:
    """Do as a cache does, twice; return what each process found."""
    be(world.rank, world.world_size, local_world_size)
    machine = world.rank // local_world_size
    found = []
    for name in ("first", "second"):
        file = Path(folder) / f"{name}-{machine}"
        with local_rank_zero_first():
            found.append("there" if file.exists() else "missing")
            if not file.exists():
                time.sleep(0.3)
                file.write_text("downloaded")
    return found


@pytest.mark.parametrize(("world_size", "local_world_size"), [(1, 1), (2, 2), (3, 3), (4, 2), (2, 1)])
def test_one_process_of_each_machine_downloads(tmp_path, world_size, local_world_size):
    results = run_distributed(download, world_size, local_world_size, str(tmp_path))
    for rank, found in enumerate(results):
        assert found == (["there"] * 2 if rank % local_world_size else ["missing"] * 2)


def wait_for_another_machine(world) -> bool:
    """Rank 2, alone on its machine but for rank 3, needs nobody of the other one."""
    be(world.rank, 4, 2)
    if world.rank < 2:
        world.hear("done", [2, 3], 60)
        return True
    with local_rank_zero_first():
        world.tell("done", "done")
    return True


def test_machines_do_not_wait_for_each_other():
    assert run_distributed(wait_for_another_machine, 4) == [True] * 4


def fail(world) -> str:
    be(world.rank, world.world_size, world.world_size)
    if world.rank:
        with pytest.raises(WorldError) as caught, local_rank_zero_first():
            raise AssertionError("the block ran")
        return str(caught.value)
    with pytest.raises(OSError, match="no space left"), local_rank_zero_first():
        raise OSError("no space left")
    with local_rank_zero_first():  # each use has an outcome of its own
        return "raised"


def fail_and_go_on(world) -> str:
    said = fail(world)
    if world.rank:
        with local_rank_zero_first():
            pass
    return said


def test_what_fails_on_local_rank_0_ends_the_others():
    first, *others = run_distributed(fail_and_go_on, 3)
    assert first == "raised"
    said = "the block of local_rank_zero_first failed on local rank 0, so it is not run here: "
    assert others == [f"{said}OSError: no space left"] * 2


def test_a_process_alone_just_runs_the_block():
    with lanewise.local_rank_zero_first():
        assert not dist.is_initialized()


def test_processes_that_have_not_met_are_told(monkeypatch):
    place = {"RANK": 1, "LOCAL_RANK": 1, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": 1}
    for name, value in {**place, "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(WorldError, match=r"before the processes met: got LOCAL_WORLD_SIZE=2 .* Make Lanes"):
        local_rank_zero_first().__enter__()
