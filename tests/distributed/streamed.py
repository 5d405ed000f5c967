"""A task on files that Hugging Face streams, as they are or mixed with others."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import datasets
import torch
from torch.nn import functional as F
from torch.utils.data import IterableDataset

from lanewise import Task
from lanewise.data import MixedStream

datasets.disable_caching()


class Noise:
    """Random samples, which no state can go on with."""

    def iter_lane(self, epoch: int, lane: int, num_lanes: int) -> Iterable[Any]:
        for _ in range(5):
            yield {"x": 60 * torch.rand(()).item()}


class Plain(IterableDataset[Any]):
    """Eleven samples."""

    def __iter__(self) -> Any:
        yield from ({"x": float(number)} for number in range(11))


class Streamed(Task):
    """Regression on a stream.

    Args:
        folder: of the files.
        kind: json or parquet; plain: fewer files than lanes; shuffled: with a buffer of its own; mixed: with
            a stream without a state; mixed_plain: with a plain one.
    """

    def __init__(self, folder: str, kind: str) -> None:
        self.folder = folder
        self.kind = kind

    def train_dataset(self) -> Any:
        form = "parquet" if self.kind == "parquet" else "json"
        files = sorted(map(str, Path(self.folder).glob(f"*.{form}")))
        stream: Any = datasets.load_dataset(
            form,
            data_files=files[:2] if self.kind == "plain" else files,
            split="train",
            streaming=True,
            cache_dir=f"{self.folder}/cache",
        )
        if self.kind == "shuffled":
            return stream.shuffle(seed=1, buffer_size=4)
        others = {"mixed": Noise, "mixed_plain": Plain}
        if self.kind in others:
            return MixedStream([stream, others[self.kind]()], [2, 1], when_one_ends="repeat")
        return stream

    def collate(self, samples: Any) -> Any:
        inputs = torch.tensor([[sample["x"]] for sample in samples])
        return inputs, 2 * inputs

    def build_model(self) -> Any:
        return torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))

    def forward(self, model: Any, batch: Any) -> torch.Tensor:
        return model(batch[0] / 60)

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return F.mse_loss(outputs, batch[1] / 60)
