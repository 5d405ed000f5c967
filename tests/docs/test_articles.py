"""What docs/coming_from/README.md says of five articles: their lines, ours, what goes wrong in theirs."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from tests.integration.command import BIN, TORCHRUN, Cold, Done, run, train
from tests.listening import reserve_port
from tests.script import run_script

PAGES = Path(__file__).parents[2] / "docs" / "coming_from"
CODE = PAGES / "code"
PYTHON = BIN / "python"


@pytest.fixture
def folder(tmp_path) -> Path:
    """A copy of the programs of the pages."""
    return Path(
        shutil.copytree(CODE, tmp_path / "code", ignore=shutil.ignore_patterns("__pycache__", "runs"))
    )


def spawn(name: str, folder: Path, *nodes: str) -> list[Done]:
    """Run a program with mp.spawn on several nodes, each by its own line as printed there."""
    variables = {"MASTER_PORT": str(reserve_port())}
    commands = [Cold(PYTHON, name, *line.split(), cwd=folder, variables=variables) for line in nodes]
    for command in commands:
        command.__enter__()
    try:
        return [command.finish().require_success() for command in commands]
    finally:
        for command in commands:
            command.__exit__(None, None, None)


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


FORKING = """
import runpy
from functools import partial

from torch import multiprocessing as mp

mp.spawn = partial(mp.start_processes, start_method="fork")
runpy.run_path("spawn_ours.py", run_name="__main__")
"""


def test_the_program_with_mp_spawn_keeps_its_command_line(folder, monkeypatch):
    """Its processes are forked here; `make test-all` spawns them."""
    monkeypatch.setenv("MASTER_PORT", str(reserve_port()))
    (folder / "forking.py").write_text(FORKING)
    assert "Epoch [3/3]" in run_script(folder / "forking.py", "-n", 1, "-g", 2, "-nr", 0, cwd=folder)
    two = weights(folder)
    run_script(folder / "data_parallel_ours.py", cwd=folder)  # the same loop, alone
    assert weights(folder) == two


@pytest.mark.slow
def test_their_program_with_mp_spawn_runs_and_ours_does_on_two_nodes(folder):
    (theirs,) = spawn("spawn_theirs.py", folder, "-n 1 -g 2 -nr 0")
    assert "Epoch [3/3]" in theirs.stdout
    first, second = spawn("spawn_ours.py", folder, "-n 2 -g 1 -nr 0", "-n 2 -g 1 -nr 1")
    assert ("Epoch [3/3]" in first.stdout, second.stdout) == (True, "")
    two = weights(folder)
    spawn("spawn_ours.py", folder, "-n 1 -g 1 -nr 0")
    assert weights(folder) == two


def val_losses(printed: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"val loss (\S+)", printed)]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_character_gpt_trains_on_their_files_and_is_the_same_on_two_processes(folder):
    run_script(folder / "nanogpt_prepare.py", cwd=folder)
    theirs = val_losses(run_script(folder / "nanogpt_theirs.py", cwd=folder))
    assert len(theirs) == 3
    ours = folder / "nanogpt_ours.yaml"
    for devices in (1, 2):
        train(
            ours, f"--distributed.devices={devices}", f"--train.run_dir=on-{devices}", cwd=folder
        ).require_success()
    assert weights(folder / "on-1") == weights(folder / "on-2")
    lines = [json.loads(line) for line in (folder / "on-2" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["val/loss"] for line in lines if "val/loss" in line]
    assert losses == pytest.approx(theirs, abs=0.1)  # other samples; from 4.8 before training to 3.3
    printed = run_script(folder / "nanogpt_sample.py", folder / "on-2", cwd=folder)
    assert "--- before training" in printed
    assert "--- after training" in printed


@pytest.mark.slow
def test_their_character_gpt_is_another_model_on_two_processes(folder):
    run_script(folder / "nanogpt_prepare.py", cwd=folder)
    alone = run(PYTHON, "nanogpt_theirs.py", cwd=folder).require_success()
    two = run(*TORCHRUN, 2, "nanogpt_theirs.py", cwd=folder).require_success()
    assert val_losses(alone.stdout) != val_losses(two.stdout)


REDUCERS = ("ddp", "data_parallel", "balanced_data_parallel")


def test_own_parquet_trains_at_once_and_is_the_same_in_every_mode(folder):
    """On two devices, one of which has row groups that another mode reads elsewhere."""
    pytest.importorskip("pyarrow")
    run_script(folder / "make_sessions.py", cwd=folder)
    train(
        folder / "own_parquet.yaml", "--distributed.devices=1", "--train.run_dir=one", cwd=folder
    ).require_success()
    for reducer in REDUCERS:
        options = (
            f"--distributed.reducer={reducer}",
            "--distributed.devices=2",
            f"--train.run_dir={reducer}",
        )
        train(folder / "own_parquet.yaml", *options, cwd=folder).require_success()
        assert weights(folder / reducer) == weights(folder / "one"), reducer


MEMORY = """
from typing import Any

import torch
from toy import train_data
from torch import nn

from lanewise import Task


class Memory(nn.Module):
    \"\"\"Returns its memory as Transformer-XL does: [time, batch, width], not to be joined by its rows.\"\"\"

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.Linear(9, 16), nn.Linear(16, 3)

    def forward(self, inputs: torch.Tensor) -> Any:
        places = torch.arange(4.0)[:, None, None].expand(4, len(inputs), 1)
        memory = self.cell(torch.cat([inputs.expand(4, *inputs.shape), places], 2)).tanh()
        return self.out(memory.mean(0)), memory


class Recurrent(Task):
    def build_model(self) -> nn.Module:
        return Memory()

    def train_dataset(self) -> Any:
        return train_data

    def forward(self, model: nn.Module, batch: Any) -> Any:
        return model(batch[0])

    def loss(self, outputs: Any, batch: Any) -> torch.Tensor:
        logits, memory = outputs
        assert memory.shape == (4, len(batch[0]), 16)
        return nn.functional.cross_entropy(logits, batch[1])
"""


@pytest.mark.slow
@pytest.mark.parametrize("reducer", [*REDUCERS, "fsdp"])
def test_a_memory_with_time_before_the_batch_trains_under_every_reducer(folder, reducer):
    (folder / "recurrent.py").write_text(MEMORY)
    for devices, of in ((1, "ddp"), (2, reducer)):
        options = (
            "--task=recurrent.Recurrent",
            f"--distributed.devices={devices}",
            f"--distributed.reducer={of}",
        )
        config = folder / "larger_batches_ours.yaml"
        train(config, *options, f"--train.run_dir=memory-{devices}", cwd=folder).require_success()
    assert weights(folder / "memory-1") == weights(folder / "memory-2")


LAUNCHED = ("-m", "torch.distributed.launch", "--nproc_per_node=2", "-m", "lanewise", "train")


@pytest.mark.slow
def test_the_launch_lines_of_one_machine_leave_one_model(folder):
    config = folder / "larger_batches_ours.yaml"
    gpus = {"CUDA_VISIBLE_DEVICES": "0,1"}
    train(config, "--train.run_dir=visible", cwd=folder, variables=gpus).require_success()
    variables = {"PET_MASTER_PORT": str(reserve_port()), "PYTHONWARNINGS": None}
    run(
        PYTHON, *LAUNCHED, config, "--train.run_dir=launched", cwd=folder, variables=variables
    ).require_success()
    assert weights(folder / "visible") == weights(folder / "launched")


def test_numbers_of_gpus_where_there_is_none_are_answered_by_what_to_type(folder):
    if torch.accelerator.is_available():
        pytest.skip("there are devices that have numbers")
    done = train(folder / "larger_batches_ours.yaml", "--distributed.devices=[0, 1]", cwd=folder)
    assert done.code == 2
    assert "Use --distributed.devices 2" in done.errors[0]


def test_what_goes_wrong_in_the_articles():
    samples = list(range(8))
    sampler = DistributedSampler(samples, num_replicas=2, rank=0, seed=0)
    first, second = list(sampler), list(sampler)
    assert first == second  # set_epoch was not called
    sampler.set_epoch(1)
    assert list(sampler) != first

    loader = DataLoader(torch.arange(8), batch_size=2)
    batches = [next(iter(loader)) for _ in range(3)]
    assert [batch.tolist() for batch in batches] == [[0, 1]] * 3  # the first batch, three times


def test_the_last_group_of_an_epoch_is_lost_in_theirs_and_is_a_step_of_ours(folder):
    printed = run_script(folder / "larger_batches_theirs.py", cwd=folder)
    assert re.findall(r"step (\d+):", printed) == ["1", "2", "3"]
    train(folder / "larger_batches_ours.yaml", "--train.epochs=1", cwd=folder).require_success()
    lines = [json.loads(line) for line in (folder / "runs/larger/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "test/loss" in line] == [1, 2, 3, 4]


def test_the_index_leads_to_a_page_with_both_sides_for_each_article():
    index = (PAGES / "README.md").read_text().partition("## You read this article")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| [^|]* \| \[[^]]*\]\((\w+\.md)\).* \| [^|]+ \|$", index, flags=re.MULTILINE)
    assert len(rows) == 5
    for name in rows:
        text = (PAGES / name).read_text()
        assert "_theirs." in text, name
        assert "## There and here" in text, name
        assert "## What does not carry over" in text, name
