"""Tasks around models that nobody here wrote, as a user would write them."""

import warnings
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from lanewise import Loss, Task

# torch.nn.Transformer uses them in evaluation mode, for padded sources.
warnings.filterwarnings("ignore", "The PyTorch API of nested tensors is in prototype stage")


class Images(Task):
    """A small ResNet of basic blocks, as torchvision builds them."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            BasicBlock(8, 8, 1),
            BasicBlock(8, 16, 2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(16, 5),
        )

    def train_dataset(self) -> Dataset[Any]:
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(45, 3, 8, 8, generator=generator)
        return TensorDataset(images, torch.randint(5, (45,), generator=generator))

    def forward(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch[0])

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return F.cross_entropy(outputs, batch[1])


class BasicBlock(nn.Module):
    def __init__(self, num_inputs: int, num_outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(num_inputs, num_outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(num_outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(num_outputs, num_outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(num_outputs)
        self.downsample = nn.Sequential(
            nn.Conv2d(num_inputs, num_outputs, 1, stride, bias=False), nn.BatchNorm2d(num_outputs)
        )

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(given)))))
        return self.relu(out + self.downsample(given))


class Translation(Task):
    """torch.nn.Transformer, from a sequence to its reverse; ragged, padded and masked."""

    def build_model(self) -> nn.Module:
        return nn.ModuleDict(
            {
                "embedding": nn.Embedding(20, 16, padding_idx=0),
                "transformer": nn.Transformer(16, 2, 1, 1, 32, dropout=0.1, batch_first=True),
                "head": nn.Linear(16, 20),
            }
        )

    def train_dataset(self) -> Any:
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(2, 8, (45,), generator=generator).tolist()
        return [torch.randint(1, 20, (length,), generator=generator) for length in lengths]

    def collate(self, samples: list[Any]) -> Any:
        pad = nn.utils.rnn.pad_sequence
        return pad(samples, True), pad([sample.flip(0) for sample in samples], True)

    def forward(self, model: nn.Module, batch: Any) -> torch.Tensor:
        source, target = batch
        shifted = F.pad(target[:, :-1], (1, 0), value=1)
        hidden = model["transformer"](
            model["embedding"](source),
            model["embedding"](shifted),
            tgt_mask=nn.Transformer.generate_square_subsequent_mask(shifted.shape[1]).isinf(),
            src_key_padding_mask=source == 0,
            memory_key_padding_mask=source == 0,
        )
        return model["head"](hidden)

    def loss(self, outputs: torch.Tensor, batch: Any) -> Loss:
        total = F.cross_entropy(outputs.transpose(1, 2), batch[1], ignore_index=0, reduction="sum")
        return Loss(total, (batch[1] > 0).sum())


class Series(Task):
    """An LSTM over packed sequences."""

    def build_model(self) -> nn.Module:
        return nn.ModuleDict({"lstm": nn.LSTM(3, 8, 2, dropout=0.2), "head": nn.Linear(8, 1)})

    def train_dataset(self) -> Any:
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(2, 9, (45,), generator=generator).tolist()
        return [torch.randn(length, 3, generator=generator) for length in lengths]

    def collate(self, samples: list[Any]) -> Any:
        return nn.utils.rnn.pack_sequence(samples, enforce_sorted=False)

    def forward(self, model: nn.Module, batch: Any) -> torch.Tensor:
        _, (hidden, _) = model["lstm"](batch)
        return model["head"](hidden[-1])

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        sums, _ = nn.utils.rnn.pad_packed_sequence(batch)
        return F.mse_loss(outputs, sums.sum((0, 2)).unsqueeze(1))
