"""Parquet files of any layout serve any number of processes: the same samples, steps and bytes, read once."""

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy

from lanewise import Loss, Task
from lanewise.config import DataConfig, DistributedConfig, PrecisionName, RunConfig
from lanewise.data import ParquetDataset, pad
from lanewise.engine.engine import build_engine
from lanewise.processes.world.world import World
from lanewise.testing import run_distributed
from tests.distributed.commands.test_verify import _fast_processes, verify  # noqa: F401 - a fixture
from tests.distributed.tasks import configure, train

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

WORLDS = (1, 2, 3, 5)


def write(path: Path, first: int, group_sizes: list[int]) -> None:
    """Write rows that are numbered from `first` on, in row groups of these sizes."""
    draws = np.random.default_rng(first)
    schema = pa.schema([("number", pa.int64()), ("tokens", pa.list_(pa.int32())), ("label", pa.int8())])
    with pq.ParquetWriter(path, schema) as writer:
        for size in group_sizes:
            tokens = [draws.integers(1, 20, draws.integers(1, 9)) for _ in range(size)]
            numbers = range(first, first + size)
            labels = draws.integers(0, 3, size)
            writer.write_table(pa.table([list(numbers), tokens, labels], schema=schema), row_group_size=size)
            first += size


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Five files of 1 to 7 row groups, whose sizes divide by nothing."""
    folder = tmp_path_factory.mktemp("parquet")
    draws = np.random.default_rng(0)
    first = 0
    for number, num_groups in enumerate((3, 1, 7, 2, 4)):
        sizes = draws.integers(1, 40, num_groups).tolist()
        write(folder / f"{number}.parquet", first, sizes)
        first += sum(sizes)
    return folder


class Bags(Task):
    """Classifies bags of tokens."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.EmbeddingBag(20, 8, padding_idx=0), nn.Dropout(0.1), nn.Linear(8, 3))

    def train_dataset(self) -> Dataset[Any]:
        return ParquetDataset(f"{self.folder}/*.parquet", on_error="skip")

    def eval_datasets(self) -> Mapping[str, Dataset[Any]]:
        return {"all": self.train_dataset()}

    def build_metrics(self) -> Mapping[str, Metric]:
        return {"accuracy": MulticlassAccuracy(num_classes=3, average="micro")}

    def update_metrics(self, metrics: Mapping[str, Metric], outputs: Any, batch: Any) -> None:
        metrics["accuracy"].update(outputs, batch["label"])

    def collate(self, samples: Any) -> Any:
        tokens = pad(samples.columns["tokens"])
        return {
            "number": samples.columns["number"],
            "tokens": tokens.values.long(),
            "label": samples.columns["label"].long(),
            "lengths": tokens.lengths,
            "weight": float(tokens.lengths.sum()),
        }

    def forward(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch["tokens"])

    def loss(self, outputs: torch.Tensor, batch: Any) -> Loss:
        losses = F.cross_entropy(outputs, batch["label"], reduction="none")
        return Loss((losses * batch["lengths"]).sum(), batch["weight"])


def config_for(folder: Path, num_workers: int = 0, **options: Any) -> RunConfig:
    """Two epochs in eight lanes of four."""
    config = configure(Bags, num_lanes=8, micro_batch_size=4, steps=1000, folder=str(folder), **options)
    return replace(
        config,
        train=replace(config.train, epochs=2),
        data=DataConfig(num_workers=num_workers),
    )


def rows_of(world: World, config: RunConfig, first_step: int = 0, last_step: int | None = None) -> Any:
    """Return by (step, lane) the numbers of the rows that this process reads, and the bytes that it reads."""
    run = build_engine(config, world).run
    batches = list(run.loader.batches(first_step, last_step or run.last_step))
    read_bytes = sum(batch.read_bytes for batch in batches)
    rows = {
        (batch.turn.step, batch.turn.lane): batch.data["number"].tolist()
        for batch in batches
        if batch.num_samples
    }
    return rows, read_bytes, run.loader.reader.total_bytes, run.loader.schedule.steps_per_epoch


SLOW = pytest.mark.slow
"""Of products of which `make test` shows pairs."""


def in_each(world: World, function: Callable[..., Any], configs: Sequence[RunConfig]) -> list[Any]:
    """Call a function for each configuration in one world: starting one takes longer."""
    return [function(world, config) for config in configs]


@pytest.mark.parametrize(("workers", "worlds"), [((0, 2), (1, 3)), pytest.param((0, 2), WORLDS, marks=SLOW)])
def test_each_row_comes_once_an_epoch_in_the_same_step_on_any_number_of_processes(folder, workers, worlds):
    configs = [config_for(folder, num_workers) for num_workers in workers]
    whole = None
    for world_size in worlds:
        for found in zip(*run_distributed(in_each, world_size, rows_of, configs), strict=True):
            steps: dict[Any, Any] = {}
            for rows, *_ in found:
                assert not steps.keys() & rows.keys()
                steps |= rows
            whole = whole or steps
            assert steps == whole
    per_epoch = found[0][3]
    num_rows = len(ParquetDataset(f"{folder}/*.parquet"))
    for epoch in range(2):
        rows = [rows for (step, _), rows in whole.items() if step // per_epoch == epoch]
        assert sorted(itertools.chain.from_iterable(rows)) == list(range(num_rows))


@pytest.mark.parametrize("worlds", [(3,), pytest.param(WORLDS, marks=SLOW)])
def test_the_bytes_of_the_model_are_those_of_one_process(folder, worlds):
    precisions: tuple[PrecisionName, ...] = ("float32", "float32", "bf16")
    alone = in_process(folder, precisions, (0, 0, 0), 1)[0]
    assert alone[0] == alone[1] != alone[2]
    for world_size in worlds:
        assert in_process(folder, precisions, (0, 2, 0), world_size) == [alone] * world_size


def in_process(folder, precisions, workers, world_size) -> list[Any]:
    """Train with each precision and number of workers in one world."""
    pairs = zip(precisions, workers, strict=True)
    configs = [config_for(folder, num_workers, precision=precision) for precision, num_workers in pairs]
    return run_distributed(in_each, world_size, train, configs)


@pytest.mark.parametrize(
    "reducers", [("data_parallel", "balanced_data_parallel"), pytest.param(("fsdp",), marks=SLOW)]
)
def test_every_reducer_ends_with_the_same_bytes(folder, reducers):
    alone, *_ = run_distributed(train, 1, config_for(folder))
    configs = [
        replace(
            config_for(folder),
            distributed=DistributedConfig(reducer=reducer, devices=2, device_type="cpu", equality="exact"),
        )
        for reducer in reducers
    ]
    world_size = 2 if "fsdp" in reducers else 1
    assert run_distributed(in_each, world_size, train, configs)[0] == [alone] * len(reducers)


def evaluate(world: World, config: RunConfig) -> dict[str, float]:
    evaluation = build_engine(config, world).evaluation
    assert evaluation is not None
    return evaluation.run()[0]


def test_an_evaluation_gives_the_same_values(folder):
    alone, *_ = run_distributed(evaluate, 1, config_for(folder))
    assert run_distributed(evaluate, 3, config_for(folder, num_workers=2)) == [alone] * 3


def config_for_large(folder: Path) -> RunConfig:
    """One epoch in eight lanes of 64."""
    config = configure(Large, num_lanes=8, micro_batch_size=64, steps=10**6, folder=str(folder))
    return replace(config, train=replace(config.train, epochs=1))


class Large(Bags):
    """Reads rows of numbers from larger files."""

    def collate(self, samples: Any) -> Any:
        return {"number": samples.columns["number"], "values": samples.columns["values"]}


@pytest.fixture(scope="module")
def large(tmp_path_factory, request) -> Path:
    """Files of row groups of a mebibyte or more."""
    folder = tmp_path_factory.mktemp("large")
    draws = np.random.default_rng(0)
    num_files, groups_each, num_rows = request.param
    first = 0
    for number in range(num_files):
        schema = pa.schema([("number", pa.int64()), ("values", pa.list_(pa.float32(), 128))])
        path = folder / f"{number}.parquet"
        with pq.ParquetWriter(path, schema, compression="none", use_dictionary=False) as writer:
            for _ in range(groups_each):
                size = int(draws.integers(num_rows, num_rows + 300))
                values = pa.FixedSizeListArray.from_arrays(draws.random(size * 128, np.float32), 128)
                numbers = pa.array(range(first, first + size))
                writer.write_table(pa.table([numbers, values], schema=schema), row_group_size=size)
                first += size
    return folder


@pytest.mark.parametrize(
    ("large", "worlds"),
    [((4, 10, 2100), (1, 3)), pytest.param((8, 50, 2100), WORLDS, marks=SLOW)],
    indirect=["large"],
    ids=str,
)
def test_all_processes_together_read_little_more_than_the_files_have(large, worlds):
    """Each lane reads its own row groups; the seven that two lanes share are read by both."""
    config = config_for_large(large)
    num_groups = len(ParquetDataset(f"{large}/*.parquet").block_sizes())
    for world_size in worlds:
        found = run_distributed(rows_of, world_size, config)
        total = found[0][2]
        read = sum(read_bytes for _, read_bytes, _, _ in found)
        assert total > num_groups * 2**20
        assert 0.99 < read / total < 1.05 + 7 / num_groups, world_size
        counts = Counter(row for rows, *_ in found for row in itertools.chain.from_iterable(rows.values()))
        assert set(counts.values()) == {1}


@pytest.mark.parametrize("large", [(4, 100, 100)], indirect=True, ids=str)
def test_a_run_that_goes_on_reads_no_row_group_that_was_finished(large):
    """The open ones are read from their start, on whatever number of processes."""
    config = config_for_large(large)
    ((rows, _, total, num_steps),) = run_distributed(rows_of, 1, config)
    sizes = np.array(ParquetDataset(f"{large}/*.parquet").block_sizes())
    first_step = num_steps * 3 // 4
    rest = [row for (step, _), of_lane in rows.items() if step >= first_step for row in of_lane]
    unfinished = np.unique(np.searchsorted(np.cumsum(sizes), rest, side="right"))
    due = sizes[unfinished].sum() / sizes.sum()
    assert due < 0.5
    for world_size in (1, 3):
        found = run_distributed(rows_of, world_size, config, first_step)
        read = sum(read_bytes for _, read_bytes, _, _ in found)
        assert read < (due + 0.1) * total
        again = {key: of_lane for of_rank, *_ in found for key, of_lane in of_rank.items()}
        assert again == {key: of_lane for key, of_lane in rows.items() if key[0] >= first_step}


def damage(path: Path, group: int) -> None:
    """Overwrite the pages of a row group."""
    column = pq.read_metadata(path).row_group(group).column(1)
    content = bytearray(path.read_bytes())
    start = column.dictionary_page_offset or column.data_page_offset
    content[start : start + column.total_compressed_size] = b"\xff" * column.total_compressed_size
    path.write_bytes(content)


def test_a_damaged_row_group_is_left_out_alike_on_any_number_of_processes(tmp_path):
    sizes = [30, 50, 40, 60]
    write(tmp_path / "0.parquet", 0, sizes)
    damage(tmp_path / "0.parquet", 1)
    alone, *_ = run_distributed(train, 1, config_for(tmp_path))
    assert run_distributed(train, 3, config_for(tmp_path)) == [alone] * 3
    rows, *_ = run_distributed(rows_of, 1, config_for(tmp_path))[0]
    left = {row for of_lane in rows.values() for row in of_lane}
    assert left == {*range(30), *range(80, 180)}


@pytest.mark.slow
def test_verify_finds_nothing(folder):
    report = verify(config_for(folder, num_workers=1), 2)
    assert report.is_verified
    assert report.notes == []
