"""The launcher ray, on two nodes of a cluster on this machine. A test takes about 20 s."""

import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from tests.integration.command import LANEWISE, ROOT, Cold, train, wait_for, write_config
from tests.integration.ray_cluster import running_ray
from tests.soak.kill_and_resume import losses, write_noisy

pytestmark = pytest.mark.slow

ON_TWO_NODES = ("--distributed.launcher", "ray", "--distributed.nodes", 2, "--distributed.devices", 2)
SLOWLY = ("--task.init_args.sleep_seconds", 0.1)


@pytest.fixture(scope="module")
def address():
    with running_ray() as address:
        yield address


def start(address: str, config: Path, *arguments: object) -> Cold:
    variables = {"RAY_ADDRESS": address}
    return Cold(*LANEWISE, "train", config, *ON_TWO_NODES, *arguments, variables=variables, cwd=ROOT)


def test_a_run_on_two_nodes_leaves_the_model_of_one_process(address, tmp_path):
    one = tmp_path / "one"
    one.mkdir()
    train(write_config(one)).require_success()
    with start(address, write_config(tmp_path)) as command:
        done = command.finish().require_success()
    assert "4 processes on cpu" in done.stderr
    assert (tmp_path / "run/model.safetensors").read_bytes() == (one / "run/model.safetensors").read_bytes()


def carriers() -> list[int]:
    """The process ids of the actors."""
    titles = {int(path.parent.name): path.read_text() for path in Path("/proc").glob("[0-9]*/cmdline")}
    return [pid for pid, title in titles.items() if title.startswith("ray::CommandWire")]


@pytest.fixture
def begun(address, tmp_path):
    """A run that has taken some steps, and saves only if it is told to stop."""
    metrics = tmp_path / "run" / "metrics.jsonl"
    with start(address, write_noisy(tmp_path, num_steps=1000, checkpoint={}), *SLOWLY) as command:
        wait_for(lambda: metrics.exists() and len(metrics.read_bytes().splitlines()) > 3)
        yield command


def of_the_run() -> list[int]:
    """The process ids of what the actors have started: the processes of the hosts, and the ranks."""
    parents, names = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended meanwhile
            pid = int(folder.name)
            parents[pid] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            names[pid] = (folder / "cmdline").read_text()
    found = set(carriers())
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return [pid for pid in found if names[pid].startswith("lanewise: ")]


def is_gone(pids: list[int]) -> bool:
    """Tell whether all of some processes have ended."""
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_an_actor_that_is_killed_ends_the_run_and_is_named(begun):
    started = of_the_run()
    assert len(started) == 2 + 4
    os.kill(carriers()[0], signal.SIGKILL)
    done = begun.finish()
    assert done.code == 1
    (error,) = done.errors
    assert "its process has ended (Ray's actor is gone: The actor died unexpectedly" in error
    wait_for(lambda: is_gone(started))


def test_a_run_that_is_told_to_stop_saves(begun, tmp_path):
    started = of_the_run()
    os.kill(begun.pid, signal.SIGTERM)
    done = begun.finish()
    assert done.code == 75, done.stderr
    num_steps = len(losses(tmp_path / "run"))
    assert [path.name for path in tmp_path.glob("run/checkpoints/*")] == [f"step-{num_steps:06d}"]
    wait_for(lambda: is_gone(started))


def test_without_a_cluster_one_error_says_so(tmp_path):
    with start("127.0.0.1:1", write_config(tmp_path)) as command:
        done = command.finish()
    assert done.code == 1
    (error,) = done.errors
    assert error.startswith("error: no Ray cluster can be reached: ")
