"""A queue of keys as state of the step, beside the same queue kept by hand.

    python benchmarks/step_state.py

MoCo with a queue of 65,536 keys of 128 numbers and a batch of 256 in four lanes, on two processes that
communicate by gloo; a query and a key encoder of two layers. Seconds of a step, divided by those of "by
hand" in the same round. There the model has no queue: lanewise trains the query encoder against a plain
tensor, and after the step a hand-written `all_gather` brings the keys of both processes, which are put into
that tensor; the key encoder follows there too. "`step_state`" is the task of docs/losses.md, "undeclared" the
same without `step_state = ("queue",)`. All three come to the same queue. The steps of the three alternate.
"""

import copy
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from section import publish, ratios, spread, table
from torch import nn
from torch.nn.functional import cross_entropy, normalize
from torch.utils.data import TensorDataset

from lanewise import Loss, Task
from lanewise.config import RunConfig
from lanewise.config.check import read_section
from lanewise.engine.engine import build_engine
from lanewise.testing import run_distributed

NUM_KEYS, WIDTH, BATCH, NUM_LANES = 65_536, 128, 256, 4


def new_queue() -> torch.Tensor:
    """Return the queue of the begin."""
    return normalize(torch.randn(NUM_KEYS, WIDTH, generator=torch.Generator().manual_seed(1)))


class MoCo(Task):
    """The queue is a buffer that the step changes."""

    step_state: tuple[str, ...] = ("queue",)

    def build_model(self) -> nn.Module:
        """See `Task`."""
        model = nn.Module()
        model.query = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, WIDTH))
        model.key = copy.deepcopy(model.query).requires_grad_(requires_grad=False)
        model.register_buffer("queue", new_queue())
        return model

    def train_dataset(self) -> Any:
        """See `Task`."""
        return TensorDataset(torch.randn(8 * BATCH, 256, generator=torch.Generator().manual_seed(2)))

    def forward(self, model: Any, batch: Any) -> Any:
        """See `Task`."""
        with torch.no_grad():
            keys = normalize(model.key(batch[0].roll(1, 1)))
        return normalize(model.query(batch[0])), keys, model.queue

    def loss(self, outputs: Any, batch: Any) -> Loss:
        """See `Task`."""
        queries, keys, queue = outputs
        logits = torch.cat([(queries * keys).sum(1, keepdim=True), queries @ queue.T], dim=1) / 0.2
        value = cross_entropy(logits, torch.zeros(len(logits), dtype=torch.int64))
        return Loss.mean(value, len(queries), gather={"keys": keys})

    def after_update(self, model: Any, step: Any) -> None:
        """See `Task`."""
        follow(model)
        model.queue.copy_(torch.cat([step.gathered["keys"], model.queue])[:NUM_KEYS])


class Undeclared(MoCo):
    """The same for a user who has not read of `step_state`."""

    step_state = ()


class ByHand(MoCo):
    """Keeps the queue outside of the model, and the keys of this process."""

    step_state = ()
    after_update = Task.after_update

    def __init__(self) -> None:
        # By the first number of a lane: the first step runs some lanes a second time.
        self.keys: dict[float, torch.Tensor] = {}
        self.queue = new_queue()

    def build_model(self) -> nn.Module:
        """See `Task`."""
        model = super().build_model()
        del model.queue
        return model

    def forward(self, model: Any, batch: Any) -> Any:
        """See `Task`."""
        with torch.no_grad():
            keys = normalize(model.key(batch[0].roll(1, 1)))
        self.keys[batch[0][0, 0].item()] = keys
        return normalize(model.query(batch[0])), keys, self.queue

    def loss(self, outputs: Any, batch: Any) -> Loss:
        """See `Task`."""
        loss = super().loss(outputs, batch)
        return Loss(loss.sum, loss.weight)

    def finish(self, model: Any) -> None:
        """Do after a step what `after_update` does."""
        own, self.keys = torch.cat([*self.keys.values()]), {}
        keys = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(keys, own)
        with torch.no_grad():
            follow(model)
            self.queue.copy_(torch.cat([*keys, self.queue])[:NUM_KEYS])


def follow(model: Any) -> None:
    """Move the key encoder towards the query encoder."""
    for mine, theirs in zip(model.key.parameters(), model.query.parameters(), strict=True):
        mine.lerp_(theirs, 0.01)


WAYS: dict[str, type[MoCo]] = {"by hand": ByHand, "`step_state`": MoCo, "undeclared": Undeclared}


def take_turns(world: Any, num_rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each step of each way, but for the first steps."""
    sections = {
        "task": {"class_path": "step_state.MoCo"},
        "batch": {"global_batch_size": BATCH, "micro_batch_size": BATCH // NUM_LANES},
        "train": {"max_steps": num_rounds + 3, "run_dir": "run"},
        "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.05}},
        "data": {"order": {"class_path": "sequential"}},
        "distributed": {"device_type": "cpu", "backend": "gloo"},
    }
    config, tasks = read_section(RunConfig, sections), {way: kind() for way, kind in WAYS.items()}
    by_hand = tasks["by hand"]
    assert isinstance(by_hand, ByHand)
    engines = {way: build_engine(config, world, task) for way, task in tasks.items()}
    steps = {way: engine.steps() for way, engine in engines.items()}
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(num_rounds + 3):
        for way, task in tasks.items():
            dist.barrier()
            start = time.perf_counter()
            next(steps[way])
            if task is by_hand:
                by_hand.finish(engines[way].training.model)
            seconds[way].append(time.perf_counter() - start)
    expected = engines["`step_state`"].training.model.queue
    for found in (by_hand.queue, engines["undeclared"].training.model.queue):
        torch.testing.assert_close(found, expected)
    return {way: of_way[3:] for way, of_way in seconds.items()}


def measure(num_rounds: int) -> Iterator[str]:
    """Yield a table with a row for each way."""
    seconds = run_distributed(take_turns, 2, num_rounds)[0]
    rows = [
        [way, spread(ratios(of_way, seconds["by hand"])), spread([1000 * one for one in of_way], ".0f")]
        for way, of_way in seconds.items()
    ]
    yield table(["queue", "time of a step", "ms"], rows)


if __name__ == "__main__":
    publish("A queue as state of the step", __doc__, measure, num_rounds=15)
