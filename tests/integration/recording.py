"""The MNIST example, with a file for each process of the samples that it reads."""

import os
import sys
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

sys.path.append(str(Path(__file__).parents[2] / "examples" / "mnist"))

from mnist import Mnist


class RecordingMnist(Mnist):
    """Trains as its base does; evaluates nothing.

    Args:
        folder: gets the files `RANK-PID`, with one line of sample indices for each micro-batch.
    """

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder

    def train_dataset(self) -> Dataset[Any]:
        return Numbered(super().train_dataset())

    def eval_datasets(self) -> dict[str, Dataset[Any]]:
        return {}

    def collate(self, samples: list[Any]) -> Any:
        with Path(self.folder, f"{os.environ['RANK']}-{os.getpid()}").open("a") as file:
            file.write(" ".join(str(index) for index, _ in samples) + "\n")
        return super().collate([sample for _, sample in samples])


class Numbered(Dataset[Any]):
    """A dataset whose samples come with their index."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return index, self.dataset[index]
