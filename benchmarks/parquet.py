"""How fast rows come from Parquet in random order.

    python benchmarks/parquet.py

One file of 400,000 rows in 64 row groups, with a column of integers, one of floats and one of lists of 5 to
35 integers. Micro-batches of 64 in a random order, the lists padded, one process with one thread, no loader
workers, the file in the page cache. Beside lanewise's order `blocked` stand torch's DataLoader with a
DistributedSampler over the table that pyarrow holds in memory, a slice for each row or one `take` for each
batch, and over a `datasets.Dataset` of Hugging Face, which maps its own copy of the file. "In file order" is
pyarrow's `iter_batches`, which shuffles nothing. A round is 200 batches of each; times are CPU times.

What bounds lanewise is what Python does for each row of the lists, to slice and to join it, and for each
chunk of which a batch has rows. A `take` of a whole batch is faster, and needs the whole table in the memory
of every process; lanewise holds a window of each open row group.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from section import publish, ratios, spread, table
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lanewise.data import LaneLoader, LaneReader, ParquetDataset, Ragged, pad
from lanewise.lanes import BlockedOrder, OrderInputs, Schedule

NUM_ROWS, NUM_GROUPS, BATCH_SIZE, BATCHES_PER_ROUND = 400_000, 64, 64, 200
NUM_LANES = 8


def write(path: Path) -> None:
    """Write the file."""
    draws = np.random.default_rng(0)
    offsets = np.concatenate([[0], np.cumsum(draws.integers(5, 36, NUM_ROWS))]).astype(np.int32)
    items = pa.array(draws.integers(0, 50_000, offsets[-1]))
    columns = {
        "user": pa.array(draws.integers(0, 10**6, NUM_ROWS)),
        "price": pa.array(draws.random(NUM_ROWS, dtype=np.float32)),
        "items": pa.ListArray.from_arrays(pa.array(offsets), items),
    }
    pq.write_table(pa.table(columns), path, row_group_size=NUM_ROWS // NUM_GROUPS)


class Slices(Dataset[Any]):
    """A table in memory, row by row."""

    def __init__(self, path: Path) -> None:
        self.table = pq.read_table(path).combine_chunks()

    def __len__(self) -> int:
        num_rows: int = self.table.num_rows
        return num_rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: values[0] for name, values in self.table.slice(index, 1).to_pydict().items()}


class Takes(Slices):
    """A table in memory, a micro-batch at a time."""

    def __getitems__(self, indices: list[int]) -> Any:
        return self.table.take(indices)


def collate_dicts(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Make a micro-batch of dicts."""
    return {
        "user": torch.tensor([row["user"] for row in rows]),
        "price": torch.tensor([row["price"] for row in rows]),
        "items": pad([torch.as_tensor(row["items"]) for row in rows]),
    }


def collate_table(rows: Any) -> dict[str, Any]:
    """Make a micro-batch of a table."""
    lists = rows.column("items").combine_chunks()
    offsets = torch.from_numpy(lists.offsets.to_numpy().astype(np.int64))
    values = torch.from_numpy(lists.values.to_numpy()[offsets[0] : offsets[-1]].copy())
    return {
        "user": torch.from_numpy(rows.column("user").to_numpy().copy()),
        "price": torch.from_numpy(rows.column("price").to_numpy().copy()),
        "items": pad(Ragged(values, offsets - offsets[0])),
    }


def collate_rows(rows: Any) -> dict[str, Any]:
    """Make a micro-batch of `Rows`."""
    columns = dict(rows.columns)
    return columns | {"items": pad(columns["items"])}


def lanewise(path: Path) -> Iterator[Any]:
    """Read blocked, as a process does that carries all lanes."""
    dataset = ParquetDataset(str(path))
    schedule = Schedule(len(dataset), NUM_LANES * BATCH_SIZE, BATCH_SIZE)
    order = BlockedOrder(OrderInputs(schedule, 0, {"block_sizes": dataset.block_sizes}))
    return LaneLoader(LaneReader(dataset, collate_rows, seed=0), order, range(NUM_LANES)).batches(0, 10**6)


def shuffled(dataset: Any, collate: Callable[[Any], Any]) -> Iterator[Any]:
    """Read as a DataLoader does."""
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, num_replicas=1, rank=0)
    return iter(DataLoader(dataset, BATCH_SIZE, sampler=sampler, collate_fn=collate))


def in_file_order(path: Path) -> Iterator[Any]:
    """Read from front to end, again and again."""
    while True:
        for rows in pq.ParquetFile(path).iter_batches(BATCH_SIZE, use_threads=False):
            yield collate_table(pa.Table.from_batches([rows]))


def hugging_face(path: Path) -> Iterator[Any]:
    """Read what `datasets` made of the file."""
    from datasets import Dataset as Table

    return shuffled(Table.from_parquet(str(path), cache_dir=str(path.parent / "cache")), collate_dicts)


SIDES: dict[str, Callable[[Path], Iterator[Any]]] = {
    "lanewise, blocked": lanewise,
    "pyarrow, in file order": in_file_order,
    "DataLoader, a slice for each row": lambda path: shuffled(Slices(path), collate_dicts),
    "DataLoader, a take for each batch": lambda path: shuffled(Takes(path), collate_table),
    "Hugging Face datasets": hugging_face,
}


def measure(num_rounds: int) -> Iterator[str]:
    """Yield a table with a row for each side."""
    torch.set_num_threads(1)
    times: dict[str, list[float]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.parquet"
        write(path)
        batches = {side: make(path) for side, make in SIDES.items()}
        for number in range(num_rounds + 1):
            for side, iterator in batches.items():
                start = time.process_time()
                for _ in range(BATCHES_PER_ROUND):
                    next(iterator)
                if number:  # the first one opens the row groups
                    times[side].append(time.process_time() - start)
    num_rows = BATCHES_PER_ROUND * BATCH_SIZE
    base = times["lanewise, blocked"]
    rows = [
        [side, spread([num_rows / one for one in found], ",.0f"), spread(ratios(found, base))]
        for side, found in times.items()
    ]
    yield table(["side", "rows/s", "time by lanewise's"], rows)


if __name__ == "__main__":
    publish("Rows from Parquet", __doc__, measure, num_rounds=15)
