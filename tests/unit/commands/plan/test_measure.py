from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from lanewise.commands.plan.measure import largest_batch, measure
from lanewise.engine.run.build import build_run_loader, build_task
from lanewise.lanes import Placement
from lanewise.processes.world.world import LocalWorld
from tests.distributed.tasks import Language, configure


def config_of(name: str) -> Any:
    return configure(f"{__name__}.{name}", num_lanes=4, micro_batch_size=4, steps=1)


class Block(nn.Module):
    """One of several."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(hidden))


class Plain(Language):
    """A network of two blocks, with statistics and a constant."""

    def build_model(self) -> nn.Module:
        model = nn.Sequential(nn.BatchNorm1d(3), Block(), Block(), nn.Linear(3, 1))
        model.register_buffer("constant", torch.ones(50))
        return model

    def forward(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = model(batch.reshape(-1, 1).expand(-1, 3).float())
        return outputs

    def loss(self, outputs: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        return outputs.mean()


class FromValues(Plain):
    """Builds its model from the values of a tensor."""

    def build_model(self) -> nn.Module:
        assert torch.ones(3).tolist() == [1.0] * 3
        return super().build_model()


class LaneStream:
    """Its lanes have 0 to 3 samples, and each is wider than the one before."""

    def iter_lane(self, epoch: int, lane: int, num_lanes: int) -> Iterator[torch.Tensor]:
        return (torch.zeros(1 + number) for number in range(lane))


class PlainStream:
    """Of 6 samples, fewer than 16 batches have."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.zeros(1 + number) for number in range(6))


class OfStream(Plain):
    """Takes a stream."""

    def __init__(self, stream: str) -> None:
        self.stream = stream

    def train_dataset(self) -> Any:
        return globals()[self.stream]()

    def collate(self, samples: list[Any]) -> Any:
        return nn.utils.rnn.pad_sequence(samples, batch_first=True)


@pytest.mark.parametrize(("stream", "width"), [("LaneStream", 3), ("PlainStream", 6)])
@pytest.mark.parametrize("epochs", [1, None])
def test_the_largest_of_the_first_batches_of_a_stream(stream, width, epochs):
    config = configure(OfStream, num_lanes=4, micro_batch_size=1, steps=1, stream=stream)
    config = replace(config, train=replace(config.train, epochs=epochs))
    assert largest_batch(config).data.shape == (1, width)


def test_a_lane_runs_on_fake_tensors_and_real_ones_give_the_same():
    config = config_of("Plain")
    batch = largest_batch(config)
    measured = measure(config, batch, "cpu")
    assert measured.why_real == ""
    assert measured.repeats_blocks
    assert measure(config_of("FromValues"), batch, "cpu").memory == measured.memory


def test_the_largest_of_the_first_batches_is_taken():
    config = config_of("Plain")
    widths = [batch.data.shape[1] for batch in batches_of(config)]
    assert len(set(widths)) > 1
    assert largest_batch(config).data.shape[1] == max(widths)


def batches_of(config: Any) -> Any:
    world = LocalWorld(torch.device("cpu"))
    placement = Placement.of(config.batch.num_lanes, world)
    loader = build_run_loader(config, build_task(config), world, placement)
    return list(loader.batches(0, 4))


def test_a_forward_that_needs_values_runs_on_real_tensors_and_says_so():
    config = configure("tests.distributed.tasks.Language", num_lanes=4, micro_batch_size=4, steps=1)
    measured = measure(config, largest_batch(config), "cpu")
    assert "DataDependent" in measured.why_real
    assert measured.gradient_bytes == 4 * sum(one.numel() for one in Language().build_model().parameters())


def test_statistics_count_as_changed_buffers_and_constants_do_not():
    config = config_of("Plain")
    measured = measure(config, largest_batch(config), "cpu")
    assert measured.changed_buffer_bytes == 3 * 4 + 3 * 4 + 8
    assert measured.buffer_bytes == measured.changed_buffer_bytes + 50 * 4


def test_why_fsdp_cannot_shard_the_model_is_kept():
    config = config_of("Plain")
    fsdp = replace(config.distributed.fsdp, blocks=("Nowhere",))
    config = replace(config, distributed=replace(config.distributed, fsdp=fsdp))
    assert "Nowhere" in measure(config, largest_batch(config), "cpu").why_no_fsdp
