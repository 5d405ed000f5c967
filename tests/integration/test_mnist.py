"""The first promise: the MNIST example, trained in `exact`, is the same file on any number of processes."""

import json
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from tests.integration.command import LANEWISE, MNIST, lanewise, run

DATA = Path(os.environ.get("LANEWISE_DATA", "/nonexistent")) / "mnist"

# 4,000 samples in steps of 96 are 41 whole steps and one of 64 samples, which 6 of the 8 lanes share.
NUM_SAMPLES, GLOBAL_BATCH_SIZE, MICRO_BATCH_SIZE = 4000, 96, 12
NUM_STEPS = 42
MEASURED = ("perf/", "time", "memory/")
EPOCH = (
    "--train.epochs=1",
    "--log.every_steps=1",
    f"--batch.global_batch_size={GLOBAL_BATCH_SIZE}",
    f"--batch.micro_batch_size={MICRO_BATCH_SIZE}",
)


@dataclass(frozen=True)
class Trained:
    """What a run computed."""

    model: bytes
    metrics: list[dict[str, float]]
    """Of each step and evaluation, but for what is measured."""


def train_mnist(run_dir: Path, *overrides: object, program=lanewise) -> Trained:
    program("train", MNIST, f"--train.run_dir={run_dir}", *overrides).require_success()
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return Trained(
        (run_dir / "model.safetensors").read_bytes(),
        [{name: value for name, value in line.items() if not name.startswith(MEASURED)} for line in lines],
    )


@pytest.fixture(scope="module")
def on_one_process(tmp_path_factory):
    trained = train_mnist(tmp_path_factory.mktemp("one") / "run", *EPOCH)
    assert sum("train/loss" in line for line in trained.metrics) == NUM_STEPS
    assert trained.metrics[-1]["held_out/accuracy"] > 0.8
    return trained


@pytest.mark.slow  # test_two_processes_leave_the_model_of_one trains the smaller example
@pytest.mark.parametrize("devices", [2, 3, 5, 8])
def test_the_model_has_the_same_bytes_and_losses_on_any_number_of_processes(
    tmp_path, on_one_process, devices
):
    assert train_mnist(tmp_path, *EPOCH, f"--distributed.devices={devices}") == on_one_process


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "num_threads"), [(1, "1"), (1, "2"), (2, "2")])
def test_the_threads_that_the_environment_asks_for_change_nothing(
    tmp_path, on_one_process, devices, num_threads
):
    variables = {"OMP_NUM_THREADS": num_threads, "MKL_NUM_THREADS": num_threads}
    program = partial(run, *LANEWISE, variables=variables)
    trained = train_mnist(tmp_path, *EPOCH, f"--distributed.devices={devices}", program=program)
    assert trained == on_one_process


@pytest.mark.slow  # test_resume.py trains with and without workers, on one to three processes
@pytest.mark.parametrize("devices", [1, 2])
def test_loader_workers_change_nothing(tmp_path, on_one_process, devices):
    overrides = (f"--distributed.devices={devices}", "--data.num_workers=2")
    assert train_mnist(tmp_path, *EPOCH, *overrides) == on_one_process


@pytest.mark.slow
def test_each_process_reads_its_own_lanes_and_nothing_else(tmp_path, on_one_process):
    folder = tmp_path / "indices"
    folder.mkdir()
    overrides = (
        f"--search_path={Path(__file__).parent}",
        f"--task={{class_path: recording.RecordingMnist, init_args: {{folder: {folder}}}}}",
        "--distributed.devices=3",
    )
    trained = train_mnist(tmp_path / "run", *EPOCH, *overrides)
    of_training = [line for line in on_one_process.metrics if "train/loss" in line]
    assert trained == Trained(on_one_process.model, of_training)

    read = {int(path.name.partition("-")[0]): path.read_text().splitlines() for path in folder.iterdir()}
    assert sorted(read) == [0, 1, 2]
    indices = [int(index) for lines in read.values() for line in lines for index in line.split()]
    assert sorted(indices) == list(range(NUM_SAMPLES))  # disjoint, and together the epoch
    for rank, lines in read.items():
        num_batches = 2 * (NUM_STEPS - 1) if rank == 2 else 3 * NUM_STEPS  # lanes 6 and 7 lack the last step
        assert len(lines) == num_batches
        assert all(len(line.split()) <= MICRO_BATCH_SIZE for line in lines)


@pytest.mark.slow
@pytest.mark.skipif(not DATA.exists(), reason="the 60,000 digits are not in $LANEWISE_DATA/mnist")
def test_the_full_set_of_digits_gives_the_same_bytes_too(tmp_path):
    overrides = (f"--task.init_args.root={DATA}", "--train.max_steps=5")
    one, two = (
        train_mnist(tmp_path / str(devices), *overrides, f"--distributed.devices={devices}")
        for devices in (1, 2)
    )
    assert one == two
    assert "samples: 60,000" in (tmp_path / "1" / "logs" / "rank-00000.log").read_text()
