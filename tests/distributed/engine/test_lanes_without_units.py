"""Losses that are divided by a number of units which many micro-batches have none of.

Detectors divide by the objects of a batch. A picture without one still has a loss: that of its background.
Each loss here is compared with one graph over the whole batch, in float64.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lanewise import Loss, Task
from lanewise.config import DataConfig, DistributedConfig, FSDPConfig, RunConfig
from lanewise.engine.engine import build_engine
from lanewise.engine.run.build import build_model
from lanewise.processes.device.determinism import set_determinism
from tests.distributed.tasks import configure, train
from tests.slow import slow
from tests.unit.engine.own_loop.test_lanes import make_lanes
from tests.worlds import run_distributed

NUM_SAMPLES, GLOBAL, STEPS, RATE = 21, 8, 3, 0.02
LAYOUTS = [(n, size) for n, size in product((1, 2, 3), (1, 2, 4, 8)) if n * size <= GLOBAL]
"""Numbers of processes with micro-batch sizes; each process has a lane."""


def _bce(logits: Tensor, targets: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, targets, reduction="none")


def focal(z: Tensor, b: Any) -> Loss:
    p = torch.sigmoid(z)
    right = p * b["found"] + (1 - p) * (1 - b["found"])
    return Loss((_bce(z, b["found"]) * (1 - right) ** 2).sum(), b["found"].sum())


def set_prediction(z: Tensor, b: Any) -> Loss:
    """All queries are classified, most as no object; divided by the objects, as DETR does."""
    objects, rarity = b["found"].long(), torch.tensor([0.1, 1.0], dtype=z.dtype)
    pairs = torch.stack([-z, z], -1).flatten(0, 1)
    return Loss(F.cross_entropy(pairs, objects.flatten(), rarity, reduction="sum"), objects.sum())


def boxes_and_objectness(z: Tensor, b: Any) -> Loss:
    boxes = ((z - b["values"]).abs() * b["found"]).sum()
    return Loss(boxes + _bce(z, b["found"]).sum(), b["found"].sum())


def boxes_alone(z: Tensor, b: Any) -> Loss:
    return Loss(((z - b["values"]).abs() * b["found"]).sum(), b["found"].sum())


def hard_negatives(z: Tensor, b: Any) -> Loss:
    negatives = _bce(z, b["found"]).masked_fill(b["found"] > 0, 0.0)
    hardest = negatives.sort(1, descending=True).values[:, :3].sum()
    return Loss(hardest + (_bce(z, b["found"]) * b["found"]).sum(), b["found"].sum())


def centres(z: Tensor, b: Any) -> Loss:
    p, heat = torch.sigmoid(z), torch.exp(-(b["values"] ** 2))
    far = -((1 - heat) ** 4) * p**2 * torch.log(1 - p)
    near = -((1 - p) ** 2) * torch.log(p) * b["found"]
    return Loss((near + far * (1 - b["found"])).sum(), b["found"].sum())


def centreness(z: Tensor, b: Any) -> Loss:
    """The weight is a sum of fractions, not a count."""
    shares = b["found"] * b["values"].abs()
    return Loss((shares * _bce(z, b["found"])).sum() + 0.01 * z.square().sum(), shares.sum())


def masks(z: Tensor, b: Any) -> Loss:
    p, has = torch.sigmoid(z), b["found"].amax(1)
    dice = 1 - 2 * (p * b["found"]).sum(1) / (p.sum(1) + b["found"].sum(1))
    return Loss((dice * has).sum() + (p.square().sum(1) * (1 - has)).sum(), has.sum())


def alignment(z: Tensor, b: Any) -> Loss:
    """CTC, in which a sample without a transcript is all blanks; divided by the characters."""
    frames = F.log_softmax(z.reshape(len(z), 5, 2), -1).transpose(0, 1)
    lengths = b["found"].sum(1).clamp(max=2).long()
    targets = torch.ones(len(z), 2, dtype=torch.long)
    sizes = torch.full((len(z),), 5)
    return Loss(
        F.ctc_loss(frames, targets, sizes, lengths, reduction="sum", zero_infinity=True), lengths.sum()
    )


def voice_activity(z: Tensor, b: Any) -> Loss:
    voiced = (b["found"].cumsum(1) > 0).to(z.dtype)
    return Loss(_bce(z, voiced).sum(), voiced.sum())


def keyword(z: Tensor, b: Any) -> Loss:
    false_alarm = F.relu(z.amax(1)) * (1 - b["found"].amax(1))
    return Loss((false_alarm + _bce(z, b["found"]).sum(1)).sum(), b["found"].amax(1).sum())


def stop_tokens(z: Tensor, b: Any) -> Loss:
    return Loss(_bce(z.cumsum(1), b["found"]).sum(), b["found"].sum())


def speakers(z: Tensor, b: Any) -> Loss:
    """The better of two orders of the speakers; divided by the frames in which somebody speaks."""
    one, other = b["found"], b["found"].flip(1)
    best = torch.minimum(_bce(z, one).sum(1), _bce(z, other).sum(1))
    return Loss(best.sum(), one.sum())


def blanks(z: Tensor, b: Any) -> Loss:
    emitted = torch.logsumexp(z, 1) - (z * b["found"]).sum(1)
    return Loss(emitted.sum(), b["found"].sum())


def pairs(z: Tensor, b: Any) -> Loss:
    """Each relevant one above each other one, and a penalty of large scores."""
    is_pair = b["found"][:, :, None] * (1 - b["found"][:, None, :])
    margins = F.relu(1 - (z[:, :, None] - z[:, None, :])) * is_pair
    return Loss(margins.sum() + 0.1 * z.square().sum(), is_pair.sum())


def listwise(z: Tensor, b: Any) -> Loss:
    return Loss(-(F.log_softmax(z, 1) * b["found"]).sum() + F.softplus(z).sum(), b["found"].sum())


def clicks(z: Tensor, b: Any) -> Loss:
    drawn = z.roll(1, dims=1)
    return Loss((-F.logsigmoid(z - drawn) * b["found"]).sum() + 0.01 * drawn.square().sum(), b["found"].sum())


def sampled_negatives(z: Tensor, b: Any) -> Loss:
    above = -F.logsigmoid(z) * b["found"]
    return Loss((above - F.logsigmoid(-z) * (1 - b["found"])).sum(), b["found"].sum())


def divided_by_nothing(z: Tensor, b: Any) -> Loss:
    """0 / 0 where there is no unit: no loss."""
    mean = (z.square() * b["found"]).sum() / b["found"].sum()
    return Loss(mean * b["found"].sum(), b["found"].sum())


def mean_over_units(z: Tensor, b: Any) -> Loss:
    return Loss.mean((z.square() * b["found"]).sum() / b["found"].sum(), b["found"].sum())


def nothing_where_none(z: Tensor, b: Any) -> Loss:
    """No gradient where there is no unit."""
    if not b["found"].any():
        return Loss(torch.zeros((), dtype=z.dtype), 0)
    return Loss((z.square() * b["found"]).sum(), b["found"].sum())


def masked_tokens(z: Tensor, b: Any) -> Loss:
    targets = torch.where(b["found"].any(1), b["found"].argmax(1), -100)
    return Loss(F.cross_entropy(z, targets, reduction="sum", ignore_index=-100), (targets >= 0).sum())


def masked_tokens_and_norm(z: Tensor, b: Any) -> Loss:
    loss = masked_tokens(z, b)
    return Loss(loss.sum + 1e-2 * torch.logsumexp(z, 1).square().sum(), loss.weight)


def unlikely(z: Tensor, b: Any) -> Loss:
    p = F.softmax(z, 1)
    return Loss(-torch.log1p(-p * (1 - b["found"])).sum(), b["found"].sum())


def rewards(z: Tensor, b: Any) -> Loss:
    """Its sum may be 0 where its gradient is not."""
    ratio = (F.log_softmax(z, 1) - F.log_softmax(z, 1).detach()).exp() - 1
    return Loss(-(ratio * b["values"]).sum(), b["found"].sum())


def several(z: Tensor, b: Any) -> list[Loss]:
    has = b["found"].amax(1)
    return [focal(z, b), Loss(((z - b["values"]) ** 2).sum(), has.sum()), Loss(z.square().sum(), len(z))]


LOSSES: dict[str, Callable[[Tensor, Any], Any]] = {
    loss.__name__: loss
    for loss in (
        *(
            focal,
            set_prediction,
            boxes_and_objectness,
            boxes_alone,
            hard_negatives,
            centres,
            centreness,
            masks,
        ),
        *(alignment, voice_activity, keyword, stop_tokens, speakers, blanks),
        *(pairs, listwise, clicks, sampled_negatives),
        *(divided_by_nothing, mean_over_units, nothing_where_none),
        *(masked_tokens, masked_tokens_and_norm, unlikely, rewards, several),
    )
}


class Sparse(Task):
    """Samples of which most have no unit."""

    def __init__(self, loss: str) -> None:
        self.name = loss

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 10)).double()

    def train_dataset(self) -> list[dict[str, Tensor]]:
        return [_sample(index) for index in range(NUM_SAMPLES)]

    def eval_datasets(self) -> dict[str, Any]:
        return {"held_out": self.train_dataset()[3:14]}

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        return model(batch["input"])

    def loss(self, outputs: Tensor, batch: Any) -> Any:
        return LOSSES[self.name](outputs, batch)


class SparseTerms(Sparse):
    def loss_weights(self, batch: Any) -> Any:
        return [batch["found"].sum(), batch["found"].amax(1).sum(), len(batch["found"])]


def _sample(index: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(index)
    found = torch.rand(10, generator=draw) > (0.6 if index % 4 == 2 else 1.0)
    return {
        "input": torch.randn(6, generator=draw).double(),
        "values": torch.randn(10, generator=draw).double(),
        "found": found.double(),
    }


def sparse(name: str, micro_batch_size: int, **options: Any) -> RunConfig:
    config = configure(
        SparseTerms if name == "several" else Sparse,
        num_lanes=GLOBAL // micro_batch_size,
        micro_batch_size=micro_batch_size,
        steps=STEPS,
        optimizer="torch.optim.SGD",
        lr=RATE,
        loss=name,
        **options,
    )
    return replace(config, data=DataConfig(order="sequential"))


FEW = (focal, set_prediction, mean_over_units, nothing_where_none, rewards, several)


def train_each(world: Any, names: list[str], micro_batch_size: int) -> dict[str, list[float]]:
    """Train each loss; return the trained weights, then the loss of an evaluation."""
    found = {}
    for name in names:
        set_determinism("exact", threads=1)
        engine = build_engine(sparse(name, micro_batch_size), world)
        for _ in engine.steps():
            pass
        assert engine.evaluation is not None
        values, _ = engine.evaluation.run()
        found[name] = [*_numbers(engine.training.model), values["held_out/loss"]]
    return found


def _numbers(model: nn.Module) -> list[float]:
    return torch.cat([weight.detach().flatten() for weight in model.parameters()]).tolist()


def _whole(task: Task, model: nn.Module, samples: list[Any]) -> Tensor:
    """Return the loss of samples as one graph; each term is divided by its units."""
    batch = task.collate(samples)
    returned = task.loss(task.forward(model, batch), batch)
    terms = returned if isinstance(returned, list) else [returned]
    return sum(term.sum / term.weight for term in terms if term.weight)  # type: ignore[return-value]


def by_hand(name: str) -> list[float]:
    """Return what `train_each` does, without lanes."""
    task = Sparse(name)
    model = build_model(task, 0)
    samples = task.train_dataset()
    for start in range(0, NUM_SAMPLES, GLOBAL):
        model.zero_grad()
        _whole(task, model, samples[start : start + GLOBAL]).backward()
        with torch.no_grad():
            for weight in model.parameters():
                weight.sub_(weight.grad, alpha=RATE)
    with torch.no_grad():
        evaluated = _whole(task, model, task.eval_datasets()["held_out"])
    return [*_numbers(model), float(evaluated)]


@pytest.mark.parametrize(
    ("world_size", "micro_batch_size", "losses"),
    [(1, 2, FEW), (3, 1, FEW[:1]), *slow(*((*layout, LOSSES.values()) for layout in LAYOUTS))],
)
def test_a_loss_without_units_counts_as_in_one_graph(world_size, micro_batch_size, losses):
    """A focal loss over the positives was 0.0076 off after one step: pictures of background were dropped."""
    names = [loss.__name__ for loss in losses]
    for found in run_distributed(train_each, world_size, names, micro_batch_size):
        for name in names:
            assert found[name] == pytest.approx(by_hand(name), rel=1e-11, abs=1e-12), name


def with_reducer(name: str, reducer: str, devices: int, **options: Any) -> RunConfig:
    distributed = DistributedConfig(
        reducer=reducer,  # type: ignore[arg-type]
        devices=devices,
        device_type="cpu",
        equality="exact",
        fsdp=FSDPConfig(blocks=("Linear",)),
    )
    return replace(sparse(name, 2, **options), distributed=distributed)


LAYOUTS = (("ddp", 3), ("data_parallel", 2), ("balanced_data_parallel", 3), ("fsdp", 2))


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("focal", "float32"),
        *slow(("several", "fp16"), ("divided_by_nothing", "bf16"), ("mean_over_units", "fp16")),
    ],
)
def test_each_reducer_leaves_the_bytes_of_one_device(name, precision):
    (alone,) = run_distributed(train, 1, with_reducer(name, "single", 1, precision=precision))
    for layout in LAYOUTS:
        config = with_reducer(name, *layout, precision=precision)
        for result in run_distributed(train, config.distributed.num_processes or 1, config):
            assert result == alone, layout


def own_loop(world: Any, micro_batch_size: int, of_batch: bool) -> list[float]:
    """Train the focal loss in a loop of one's own, by lanes or with a loss of the whole batch."""
    set_determinism("exact", threads=1)
    task = Sparse("focal")
    sizes = {"global_batch_size": GLOBAL, "micro_batch_size": micro_batch_size}
    lanes = make_lanes(world, **sizes)
    model = lanes.prepare(build_model(task, 0))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in lanes.steps(task.train_dataset(), order="sequential"):
        if of_batch:
            step.batch_loss(
                lambda batch: (model(batch["input"]), batch["found"]),
                lambda given: focal(given[0], {"found": given[1]}),
            )
        else:
            for batch in step:
                step.backward(focal(model(batch["input"]), batch))
        optimizer.step()
    return _numbers(model)


@pytest.mark.parametrize("of_batch", [False, True])
def test_an_own_loop_counts_them_too(of_batch):
    *expected, _ = by_hand("focal")
    for world_size, micro_batch_size in ((1, 8), (2, 2), (3, 1)):
        for found in run_distributed(own_loop, world_size, micro_batch_size, of_batch):
            assert found == pytest.approx(expected, rel=1e-11, abs=1e-12)
