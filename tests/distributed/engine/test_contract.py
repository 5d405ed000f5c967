"""What training does with tasks that are unusual or wrong, alike on one process and on several."""

import copy
import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from lanewise import Loss, Task
from lanewise.engine.engine import build_engine
from lanewise.lanes import FeistelShuffle
from lanewise.processes.device.determinism import set_determinism
from tests.distributed.tasks import Language, configure, train
from tests.slow import slow
from tests.worlds import run_distributed

EITHER = pytest.mark.parametrize("world_size", [1, 3])


class Line(Task):
    """A linear model on 22 samples; sample i has the input i."""

    def build_model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def train_dataset(self) -> Dataset[Any]:
        values = torch.arange(22.0).unsqueeze(1)
        return TensorDataset(values, 2 * values)

    def forward(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch[0] / 22)

    def loss(self, outputs: torch.Tensor, batch: Any) -> Any:
        return F.mse_loss(outputs, batch[1])


def run_line(world, task: type[Task], **options):
    config = configure(task, num_lanes=4, **{"optimizer": "torch.optim.SGD", "steps": 6, **options})
    return train(world, config)


def fail(task: type[Task], world_size: int, **options) -> str:
    with pytest.raises(RuntimeError) as error:
        run_distributed(run_task, world_size, task, options)
    return str(error.value)


def run_task(world, task, options):
    return run_line(world, task, **options)


BAD_POSITION = 12  # in the second of three steps an epoch
BAD_LANE = int(FeistelShuffle(22, seed=0).indices(0, 7, 8)[0])  # the last sample of the first step
BAD_SAMPLE = int(FeistelShuffle(22, seed=0).indices(0, BAD_POSITION, BAD_POSITION + 1)[0])


class NanAtOneSample(Line):
    def build_model(self):
        return nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1))

    def loss(self, outputs, batch):
        return (outputs * torch.where(batch[0] == BAD_SAMPLE, torch.nan, 1.0)).mean()


def skip_the_update(world):
    set_determinism("exact", 1)
    engine = build_engine(configure(NanAtOneSample, num_lanes=4, optimizer="torch.optim.SGD", steps=6), world)
    model = engine.training.model
    before = None
    try:
        for _ in engine.steps():
            before = copy.deepcopy(model.state_dict())
    except Exception as error:  # noqa: BLE001 - compared by the test
        after = model.state_dict()
        is_untouched = before is not None and all(torch.equal(before[name], after[name]) for name in after)
        return type(error).__name__, str(error), is_untouched


@EITHER
def test_a_nan_names_step_lane_and_samples_on_every_rank_and_updates_nothing(world_size):
    results = run_distributed(skip_the_update, world_size)
    assert len(set(results)) == 1
    name, message, is_untouched = results[0]
    assert name == "NonFiniteLossError"
    assert is_untouched
    lane = FeistelShuffle(22, seed=0).indices(0, 12, 14).tolist()
    assert "step 2 (epoch 1)" in message
    assert f"lane 2: loss nan, samples {lane}" in message
    assert message.count("  lane") == 1


class NanOfWeightZero(Line):
    """Samples below 4 have weight 0, and a micro-batch of them alone a mean of 0 / 0."""

    def loss(self, outputs, batch):
        counts = batch[0] >= 4
        return Loss.mean((outputs * counts).sum() / counts.sum(), counts.sum())


class SumOfTheCounted(NanOfWeightZero):
    def loss(self, outputs, batch):
        counts = batch[0] >= 4
        return Loss((outputs * counts).sum(), counts.sum())


@EITHER
def test_a_lane_of_weight_zero_contributes_nothing_even_if_its_mean_is_nan(world_size):
    options = {"micro_batch_size": 1, "steps": 12}
    _, losses = run_distributed(run_task, 1, SumOfTheCounted, options)[0]
    alone, _ = run_distributed(run_task, 1, NanOfWeightZero, options)[0]
    for state, rank_losses in run_distributed(run_task, world_size, NanOfWeightZero, options):
        assert rank_losses == pytest.approx(losses, rel=1e-6)
        assert state == alone


class Weightless(Line):
    def loss(self, outputs, batch):
        return Loss(outputs.sum(), 0)


def count_warnings(world, task, equality="exact", steps=3):
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lanewise").addHandler(handler)
    engine = build_engine(configure(task, equality=equality, optimizer="torch.optim.SGD", steps=steps), world)
    before = [parameter.clone() for parameter in engine.training.model.parameters()]
    for _ in engine.steps():
        pass
    after = list(engine.training.model.parameters())
    return records, all(map(torch.equal, before, after))


@pytest.mark.parametrize("equality", ["exact", "close"])
@EITHER
def test_a_global_weight_of_zero_updates_nothing_and_says_so(world_size, equality):
    """In `close` on one device there was no gradient at all then, which was an error of torch."""
    for records, is_untouched in run_distributed(count_warnings, world_size, Weightless, equality):
        assert is_untouched
        assert sum("weight 0" in record for record in records) == 3


class WeightlessWhereItIsPartial(Line):
    def loss(self, outputs, batch):
        return Loss(F.mse_loss(outputs, batch[1], reduction="sum"), len(outputs) if len(outputs) == 5 else 0)


@pytest.mark.parametrize("equality", ["exact", "close"])
def test_the_only_lane_of_a_step_may_have_weight_zero(equality):
    """Its weight is in the factor of its backward, where it was a division by zero."""
    options = {"micro_batch_size": 5, "steps": 6, "equality": equality}
    alone, losses = run_distributed(run_task, 1, WeightlessWhereItIsPartial, options)[0]
    assert [loss > 0 for loss in losses] == [True, False] * 3  # of the lanes' last step there is no mean
    for state, _ in run_distributed(run_task, 3, WeightlessWhereItIsPartial, options):
        assert equality == "close" or state == alone


@EITHER
def test_a_parameter_that_no_lane_uses_is_named_once(world_size):
    first, *others = [records for records, _ in run_distributed(count_warnings, world_size, Language)]
    (warning,) = [record for record in first if "no lane of the first step used" in record]
    assert warning.endswith(": never")
    assert not any("no lane of the first step used" in record for records in others for record in records)


class NormalizedLine(Line):
    """BatchNorm, whose statistics the lanes merge."""

    def build_model(self):
        model = nn.Sequential(nn.Linear(1, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        model.register_buffer("constant", torch.tensor([0.1, 0.7]))
        return model


@pytest.mark.parametrize("equality", ["exact", *slow("close")])
def test_batchnorm_statistics_do_not_depend_on_the_processes(equality):
    options = {"micro_batch_size": 3, "steps": 4, "equality": equality, "lr": 0.0}
    alone, _ = run_distributed(run_task, 1, NormalizedLine, options)[0]
    for world_size in (2, 3, 4):
        for state, _ in run_distributed(run_task, world_size, NormalizedLine, options):
            assert {k: v for k, v in state.items() if "1." in k} == {
                k: v for k, v in alone.items() if "1." in k
            }
            assert state["constant"] == torch.tensor([0.1, 0.7]).numpy().tobytes()


def first_statistics(world):
    torch.manual_seed(0)
    engine = build_engine(configure(NormalizedLine, num_lanes=4, micro_batch_size=3, steps=1), world)
    engine.step.pass_.looks.clear()  # which run a lane again
    norm = engine.training.model[1]
    seen = []
    norm.register_forward_hook(lambda _module, inputs, _output: seen.append(inputs[0].detach().clone()))
    for _ in engine.steps():
        pass
    return seen, norm.running_mean.clone(), norm.num_batches_tracked.item()


def test_batchnorm_statistics_are_the_mean_of_what_each_lane_made_of_the_start():
    seen, running_mean, num_batches = run_distributed(first_statistics, 1)[0]
    expected = sum(len(hidden) * 0.1 * hidden.mean(0) for hidden in seen) / sum(map(len, seen))
    torch.testing.assert_close(running_mean, expected)
    assert num_batches == 1
    assert len(seen) == 4


class LaneCounter(nn.Linear):
    def __init__(self) -> None:
        super().__init__(1, 1)
        self.register_buffer("largest", torch.zeros((), dtype=torch.long))

    def forward(self, inputs):
        self.largest = torch.maximum(self.largest, (inputs * 22).round().long().max())
        return super().forward(inputs)


class IntegersThatDiffer(Line):
    def build_model(self):
        return LaneCounter()


class SparseLine(Line):
    def build_model(self):
        return nn.Embedding(22, 1, sparse=True)

    def forward(self, model, batch):
        return model(batch[0].long().squeeze(1))


class Thawing(Line):
    """Trains its bias only from the second step on."""

    def build_model(self):
        self.model = super().build_model()
        self.model.bias.requires_grad = False
        return self.model

    def loss(self, outputs, batch):
        self.model.bias.requires_grad = True
        return super().loss(outputs, batch)


class Frozen(Line):
    def build_model(self):
        return super().build_model().requires_grad_(False)


class NegativeWeight(Line):
    def loss(self, outputs, batch):
        return Loss(outputs.sum(), -1)


class Detached(Line):
    def loss(self, outputs, batch):
        return super().loss(outputs, batch).detach()


class VectorLoss(Line):
    def loss(self, outputs, batch):
        return outputs.squeeze(1)


class VectorSum(Line):
    def loss(self, outputs, batch):
        return Loss(outputs.squeeze(1), weight=2)


class BackwardInTheLoss(Line):
    def loss(self, outputs, batch):
        loss = super().loss(outputs, batch)
        loss.backward(retain_graph=True)
        return loss


class BackwardInOneLane(BackwardInTheLoss):
    """In the last lane of the first step only."""

    def loss(self, outputs, batch):
        is_last = BAD_LANE in batch[0]
        return super().loss(outputs, batch) if is_last else Line.loss(self, outputs, batch)


class UpdateInBackward(Line):
    def build_model(self):
        model = super().build_model()
        optimizer = torch.optim.SGD([model.weight], lr=0.1)
        model.weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
        return model


@pytest.mark.parametrize("world_size", [1, *slow(3)])
@pytest.mark.parametrize(
    ("task", "said"),
    [
        (IntegersThatDiffer, "integer buffer largest differs between the lanes of step 1"),
        (SparseLine, "parameter weight has a sparse gradient"),
        (Thawing, "requires_grad of bias was False at the start and is True now. Leave requires_grad as"),
        (Thawing, "then, with interval: epoch (docs/task.md#a-backbone-that-is-frozen-in-the-first-epochs)"),
        (Frozen, "the model has no trainable parameter"),
        (NegativeWeight, "has the weight -1.0"),
        (Detached, "has no gradient: nothing would be trained"),
        (BackwardInTheLoss, "parameter weight got a gradient before the backward of lane"),
        (BackwardInOneLane, "parameter weight got a gradient before the backward of lane"),
        (UpdateInBackward, "parameter weight changed in the backward of lane"),
        (VectorLoss, "must be a scalar tensor or a Loss: got a tensor of shape (2,)"),
        (VectorSum, "must be a scalar tensor or a Loss: got a Loss whose sum is a tensor of shape (2,)"),
    ],
)
def test_a_broken_contract_is_one_clear_error(task, said, world_size):
    message = fail(task, world_size)
    assert "TaskError" in message
    assert said in message


def test_a_contract_that_one_lane_breaks_is_one_clear_error_on_three_processes():
    test_a_broken_contract_is_one_clear_error(BackwardInOneLane, "before the backward of lane", 3)


class OtherWeights(Line):
    def build_model(self):
        import os

        torch.manual_seed(os.getpid())
        return super().build_model()


class TrainedByOne(Line):
    """Freezes the weight on some ranks, whose gradients would be fewer than those of the others."""

    def build_model(self):
        from torch import distributed

        model = nn.Sequential(super().build_model(), nn.Linear(1, 1))
        model[1].requires_grad_(distributed.get_rank() == 0)
        return model


class OtherData(Line):
    def train_dataset(self):
        import os

        return TensorDataset(torch.full((22, 1), float(os.getpid())))


class ShortData(Line):
    def train_dataset(self):
        from torch import distributed

        return TensorDataset(torch.zeros(20 + distributed.get_rank(), 1))


class EmptyData(Line):
    def train_dataset(self):
        return TensorDataset(torch.zeros(0, 1))


@pytest.mark.parametrize(
    ("task", "said"),
    [
        (OtherWeights, "built different models: weight differs"),
        (TrainedByOne, "built different models: 1.weight differs"),
        (OtherData, "see different datasets: 22 and 22 samples"),
        (ShortData, "see different datasets: 2"),
        (EmptyData, "it has 0 samples"),
    ],
)
def test_ranks_that_differ_are_an_error_and_no_hang(task, said):
    assert said in fail(task, 2)


class Submodules(Line):
    """Calls a submodule of the model, which leaves gradients unreduced under stock DDP."""

    def build_model(self):
        return nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, model, batch):
        return model[2](model[1](model[0](batch[0] / 22)))


def test_any_part_of_the_model_may_be_called():
    alone = run_distributed(run_task, 1, Submodules, {})[0]
    for result in run_distributed(run_task, 3, Submodules, {}):
        assert result == alone


class Talking(Line):
    """Multiplies by the mean over the processes of something."""

    def loss(self, outputs, batch):
        scale = outputs.detach().abs().mean()
        dist.all_reduce(scale)
        return super().loss(outputs, batch) * scale


@pytest.mark.parametrize(
    ("world_size", "equality", "said"),
    [
        (2, "exact", "so its result depends on their number, which exact rules out"),
        (3, "close", "in step 1 these have 2 and 1 lanes"),
        (2, "close", "in step 3 these have 2 and 1 lanes"),  # the partial last one of the epoch
    ],
)
def test_a_forward_that_talks_is_an_error_and_no_hang(world_size, equality, said):
    """The process with two of the four lanes waited for the others, which had one each."""
    failure = fail(Talking, world_size, equality=equality)
    assert said in failure
    assert "compute forward and loss from the lane's own samples" in failure  # it said to use BatchNorm


def test_a_forward_that_talks_where_all_have_equally_many_lanes_is_a_warning():
    for rank, (records, _) in enumerate(run_distributed(count_warnings, 2, Talking, "close", 1)):
        assert rank or sum("communicates with other processes" in record for record in records) == 1
