"""A head that computes its loss in chunks ends with the same bytes on any devices, by every reducer."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from lanewise import Loss
from lanewise.config import DistributedConfig, FSDPConfig, RunConfig
from lanewise.nn import LinearCrossEntropy
from lanewise.testing import run_distributed
from tests.distributed.tasks import VOCABULARY, Language, TinyTransformer, configure, train
from tests.slow import slow


class LossInside(TinyTransformer):
    """Returns the loss of the next tokens; the head's weight is that of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.head = LinearCrossEntropy(16, VOCABULARY, ignore_index=0, label_smoothing=0.1, z_loss=1e-3)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> Loss:
        hidden = self.block(self.embedding(tokens), src_key_padding_mask=tokens == 0)
        return self.head(hidden[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class HeadOfItsOwn(LossInside):
    """The head has a weight of its own, so that FSDP can take it for a block."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = nn.Parameter(torch.randn(VOCABULARY, 16))


class Tied(Language):
    """48 sentences of up to 9 tokens in a lane, padded: more than one chunk."""

    def build_model(self) -> nn.Module:
        return LossInside()

    def loss(self, outputs: Loss, batch: torch.Tensor) -> Loss:
        return outputs


class Untied(Tied):
    def build_model(self) -> nn.Module:
        return HeadOfItsOwn()


def config_for(
    task: type[Tied], reducer: str, num_devices: int, precision: Any, blocks: tuple[str, ...]
) -> RunConfig:
    """Two epochs of 500 samples in steps of 192; the third of each has 116."""
    config = configure(task, num_lanes=4, micro_batch_size=48, steps=6, precision=precision, num_samples=500)
    distributed = DistributedConfig(
        equality="exact",
        reducer=reducer,  # type: ignore[arg-type]
        devices=num_devices,
        device_type="cpu",
        fsdp=FSDPConfig(blocks=blocks),
    )
    return replace(config, distributed=distributed)


BLOCKS = {Tied: ("TransformerEncoderLayer",), Untied: ("TransformerEncoderLayer", "LinearCrossEntropy")}


@pytest.mark.parametrize(
    ("task", "reducer", "num_devices", "precision"),
    [
        (Tied, "ddp", 3, "bf16"),
        (Tied, "balanced_data_parallel", 3, "float32"),
        *slow(
            (Tied, "ddp", 2, "float32"),
            (Untied, "fsdp", 2, "float32"),
            (Tied, "fsdp", 2, "bf16"),
            (Tied, "fsdp", 3, "float32"),
            (Tied, "data_parallel", 2, "bf16"),
        ),
    ],
)
def test_every_reducer_ends_with_the_bytes_of_one_device(task, reducer, num_devices, precision):
    single = run_distributed(train, 1, config_for(task, "single", 1, precision, ()))[0]
    config = config_for(task, reducer, num_devices, precision, BLOCKS[task])
    num_processes = config.distributed.num_processes or 1
    assert run_distributed(train, num_processes, config) == [single] * num_processes
