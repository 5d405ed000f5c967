"""A character GPT on the .bin files that nanoGPT's prepare.py writes."""

import json
from pathlib import Path
from typing import Any

import torch
from nanogpt_model import GPT
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from lanewise import Loss, Task
from lanewise.data import TokenDataset


class CharGPT(Task):
    """Predicts the next character."""

    def __init__(self, folder: str = "data/chars", block_size: int = 32) -> None:
        self.folder, self.block_size = folder, block_size
        self.itos: list[str] = json.loads(Path(folder, "meta.json").read_text())["itos"]

    def build_model(self) -> nn.Module:
        return GPT(len(self.itos), self.block_size)

    def train_dataset(self) -> Dataset[Any]:  # every position is a window
        return TokenDataset(f"{self.folder}/train.bin", window=self.block_size, stride=1)

    def eval_datasets(self) -> dict[str, Dataset[Any]]:  # windows follow one another
        return {"val": TokenDataset(f"{self.folder}/val.bin", window=self.block_size)}

    def forward(self, model: nn.Module, batch: torch.Tensor) -> Any:
        return model(batch[:, :-1])

    def loss(self, outputs: torch.Tensor, batch: torch.Tensor) -> Loss:
        targets = batch[:, 1:].contiguous()  # a slice of the windows, of which .view(-1) alone is an error
        logits = outputs.view(-1, outputs.size(-1))
        return Loss(F.cross_entropy(logits, targets.view(-1), reduction="sum"), weight=targets.numel())
