"""How fast samples of a stream are read.

    python benchmarks/streams.py

A lane-aware stream of lines of JSON, which are parsed as they are read: 16,000 samples of 16 numbers and a
class in 8 files, micro-batches of 32, 8 lanes, without loader workers and with one. Beside it a DataLoader
over an IterableDataset that gives each process its files, and a streaming Hugging Face dataset that is split
with split_dataset_by_node. On one process, and on two that read at once; the time is that of the slower one.
Nothing is trained, and the start of the worker counts.
"""

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from section import publish, ratios, spread, table
from torch.utils.data import DataLoader, IterableDataset

from lanewise.data import StreamCut, StreamLoader, StreamReader
from lanewise.data.collate import collate
from lanewise.lanes import lane_ranges
from lanewise.processes.world.world import World
from lanewise.testing import run_distributed

NUM_SAMPLES, NUM_SHARDS, NUM_LANES, BATCH_SIZE = 16_000, 8, 8, 32


def write(folder: Path) -> None:
    """Write the shards."""
    draws = torch.Generator().manual_seed(0)
    for shard in range(NUM_SHARDS):
        rows = torch.randn(NUM_SAMPLES // NUM_SHARDS, 16, generator=draws).tolist()
        lines = [json.dumps({"x": row, "y": number % 10}) for number, row in enumerate(rows)]
        (folder / f"{shard}.jsonl").write_text("\n".join(lines))


def parse(line: str) -> tuple[torch.Tensor, int]:
    """Make a sample of a line."""
    row = json.loads(line)
    return torch.tensor(row["x"]), row["y"]


class Shards:
    """A lane-aware stream: a shard for each lane."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def iter_lane(self, epoch: int, lane: int, num_lanes: int) -> Iterator[Any]:
        """Read the lane's shards."""
        del epoch
        for shard in range(lane, NUM_SHARDS, num_lanes):
            with (self.folder / f"{shard}.jsonl").open() as lines:
                yield from map(parse, lines)


class ByHand(IterableDataset[Any]):
    """The shards of a process."""

    def __init__(self, folder: Path, rank: int, world_size: int) -> None:
        self.folder, self.rank, self.world_size = folder, rank, world_size

    def __iter__(self) -> Iterator[Any]:
        for shard in range(self.rank, NUM_SHARDS, self.world_size):
            with (self.folder / f"{shard}.jsonl").open() as lines:
                yield from map(parse, lines)


def lanewise(folder: Path, world: World, num_workers: int) -> int:
    """Read an epoch of this process's lanes; return the number of samples."""
    lanes = lane_ranges(NUM_LANES, world.world_size)[world.rank]
    reader = StreamReader(Shards(folder), collate, 0, StreamCut.of(NUM_LANES, BATCH_SIZE, 0), lanes)
    loader = StreamLoader(reader, world.all_gather_tree, 1, num_workers=num_workers)
    num_samples = 0
    batches = loader.batches(0, None)
    while not loader.is_over:
        for batch in batches:
            num_samples += batch.num_samples
            if batch.turn.is_last:
                break
        assert batch.to_source is not None  # shards are equally long, so all processes send the same
        batch.to_source.receive([*batch.to_source.numbers] * world.world_size)
    return num_samples


def by_hand(folder: Path, world: World, num_workers: int) -> int:
    """Read this process's part with a DataLoader."""
    dataset = ByHand(folder, world.rank, world.world_size)
    return sum(len(y) for _, y in DataLoader(dataset, BATCH_SIZE, num_workers=num_workers))


def hugging_face(folder: Path, world: World, num_workers: int) -> int:
    """Read this process's part of a streaming dataset with a DataLoader."""
    from datasets import load_dataset
    from datasets.distributed import split_dataset_by_node

    files = [str(folder / f"{shard}.jsonl") for shard in range(NUM_SHARDS)]
    whole = load_dataset("json", data_files=files, split="train", streaming=True)
    own = split_dataset_by_node(whole.with_format("torch"), world.rank, world.world_size)
    return sum(len(batch["y"]) for batch in DataLoader(own, BATCH_SIZE, num_workers=num_workers))


SIDES: dict[str, Callable[[Path, World, int], int]] = {
    "lanewise": lanewise,
    "DataLoader, split by hand": by_hand,
    "Hugging Face, split_dataset_by_node": hugging_face,
}


def read(world: World, folder: str, num_workers: int, num_rounds: int) -> dict[str, list[float]]:
    """Read an epoch of each side in turns; return the seconds of each round."""
    torch.set_num_threads(1)
    times: dict[str, list[float]] = {side: [] for side in SIDES}
    for number in range(num_rounds + 1):
        for side, of_side in SIDES.items():
            world.all_gather_tree(None)
            start = time.perf_counter()
            told = world.all_gather_tree(of_side(Path(folder), world, num_workers))
            if number:  # the first one imports
                times[side].append(time.perf_counter() - start)
            if sum(told) != NUM_SAMPLES:
                raise ValueError(f"{side} read {told} of {NUM_SAMPLES} samples")
    return times


def measure(num_rounds: int) -> Iterator[str]:
    """Yield a table with a row for each side."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder))
        for world_size in (1, 2):
            for num_workers in (0, 1):
                times = run_distributed(
                    read, world_size, folder, num_workers, num_rounds, timeout_seconds=600
                )[0]
                base = times["lanewise"]
                for side, found in times.items():
                    speed = spread([NUM_SAMPLES / one for one in found], ",.0f")
                    rows.append([side, str(world_size), str(num_workers), speed, spread(ratios(found, base))])
    yield table(["side", "processes", "workers", "samples/s", "time by lanewise's"], rows)


if __name__ == "__main__":
    publish("Streams", __doc__, measure, num_rounds=7)
