"""The steps of a loop of one's own: their gradients are used or dropped, and the script's generators stay."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss, softplus
from torch.utils.data import Dataset, TensorDataset
from torchmetrics import MeanMetric

from lanewise import Lanes, Loss
from lanewise.engine.own_loop.steps import Step
from lanewise.errors import TaskError
from lanewise.processes.world.world import LocalWorld
from tests.generators import unmoved_generators
from tests.unit.engine.own_loop.test_lanes import make_lanes

INPUTS = torch.arange(40 * 3.0).view(40, 3).sin()
SAMPLES, OTHERS = TensorDataset(INPUTS), TensorDataset(INPUTS[:24].cos())


class Loop:
    """A model with an optimizer, and passes over a step."""

    def __init__(self, make_optimizer: Callable[..., Any] = torch.optim.SGD, **options: Any) -> None:
        self.lanes: Lanes = make_lanes(LocalWorld(torch.device("cpu")), global_batch_size=4, **options)
        self.model = self.lanes.prepare(nn.Linear(3, 2))
        self.optimizer = make_optimizer(self.model.parameters(), lr=0.01)
        self.steps = self.lanes.steps(SAMPLES)

    def run(self, step: Step, weight: float | None = None) -> None:
        for (inputs,) in step.batches(self.model):
            loss = self.model(inputs).square().mean()
            step.backward(loss if weight is None else Loss(loss * weight, weight=weight))


def zip_two_loaders(loop: Loop) -> None:
    for step, other in zip(loop.steps, loop.lanes.steps(OTHERS), strict=False):
        loop.run(step)
        loop.run(other)
        loop.optimizer.step()


def accumulate(loop: Loop) -> None:
    for step in loop.steps:
        loop.run(step)
        if step.number % 2:
            loop.optimizer.step()
            loop.optimizer.zero_grad()


def add_up_losses(loop: Loop) -> None:
    for step in loop.steps:
        loop.run(step)
        loop.run(step)
        loop.optimizer.step()


def accumulate_losses_of_the_batch(loop: Loop) -> None:
    for step in loop.steps:
        step.batch_loss(lambda batch: loop.model(batch[0]), lambda outputs: outputs.square().mean())
        if step.number % 2:
            loop.optimizer.step()


def fused(*arguments: Any, **options: Any) -> torch.optim.Optimizer:
    """An optimizer whose updates no version of a parameter tells."""
    return torch.optim.AdamW(*arguments, fused=True, **options)


@pytest.mark.parametrize("make_optimizer", [torch.optim.SGD, fused])
@pytest.mark.parametrize(
    ("train", "step"),
    [(zip_two_loaders, 2), (accumulate, 3), (add_up_losses, 2), (accumulate_losses_of_the_batch, 3)],
)
def test_a_gradient_that_nobody_used_is_an_error_before_it_is_lost(train, step, make_optimizer):
    """It was thrown away without a word: of two zipped loaders one trained the model."""
    with pytest.raises(TaskError) as caught:
        train(Loop(make_optimizer))
    said = str(caught.value)
    assert said.startswith(f"no optimizer used the gradient of step {step}, ")
    for remedy in ("dataset of pairs", "sum in one backward", "larger global_batch_size", "zero_grad()"):
        assert remedy in said


def usual(loop: Loop) -> None:
    for _ in range(2):
        for step in loop.steps:
            loop.run(step)
            loop.optimizer.step()


def drop_on_purpose(loop: Loop) -> None:
    for step in loop.steps:
        loop.run(step)
        if step.number % 3:
            loop.optimizer.step()
        else:
            loop.optimizer.zero_grad(set_to_none=step.number % 2 == 0)


def look_at_gradients_before_training(loop: Loop) -> None:
    for step in loop.steps:
        loop.run(step)
    usual(loop)


def leave_out_steps_without_weight(loop: Loop) -> None:
    for step in loop.steps:
        loop.run(step, weight=step.number % 2)
        if step.allows_update:
            loop.optimizer.step()


def minimise_sharpness(loop: Loop) -> None:
    parameters = list(loop.model.parameters())
    for step in loop.steps:
        loop.run(step)
        moves = [0.1 * parameter.grad for parameter in parameters if parameter.grad is not None]
        with torch.no_grad():
            torch._foreach_add_(parameters, moves)
        loop.run(step)
        with torch.no_grad():
            torch._foreach_sub_(parameters, moves)
        loop.optimizer.step()


def search_lines(loop: Loop) -> None:
    optimizer = torch.optim.LBFGS(loop.model.parameters(), max_iter=4, line_search_fn="strong_wolfe")
    for step in loop.steps:

        def closure(step: Step = step) -> torch.Tensor:
            loop.run(step)
            return torch.tensor(step.loss)

        optimizer.step(closure)


def two_optimizers_in_turns(loop: Loop) -> None:
    optimizers = [torch.optim.SGD([parameter], lr=0.1) for parameter in loop.model.parameters()]
    for step in loop.steps:
        loop.run(step)
        optimizers[step.number % 2].step()


def a_gan_that_leaves_out_its_critic(loop: Loop) -> None:
    """The generator's pass gives the critic gradients of this process alone, in place of those dropped."""
    critic, of_critic = loop.model, loop.optimizer
    generator = loop.lanes.prepare(nn.Linear(3, 3))
    of_generator = torch.optim.SGD(generator.parameters(), lr=0.1)
    for step in loop.steps:
        for (inputs,) in step.batches(critic):
            step.backward(softplus(critic(generator(inputs).detach()) - critic(inputs)).mean())
        if step.number % 2:
            of_critic.step()
        else:
            of_critic.zero_grad()
        for (inputs,) in step.batches(generator):
            step.backward(mse_loss(critic(generator(inputs)), critic(inputs)))
        of_generator.step()


@pytest.mark.parametrize(
    "train",
    [
        usual,
        drop_on_purpose,
        look_at_gradients_before_training,
        leave_out_steps_without_weight,
        minimise_sharpness,
        search_lines,
        two_optimizers_in_turns,
        a_gan_that_leaves_out_its_critic,
    ],
)
def test_a_loop_that_uses_its_gradients_or_drops_them_on_purpose_goes_on(train):
    loop = Loop()
    before = loop.model.weight.clone()
    train(loop)
    assert not torch.equal(loop.model.weight, before)
    loop.lanes.close()


class Noisy(Dataset[torch.Tensor]):
    """Samples that draw from all default generators; a stream of them, too."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(3) * index + random.random() + np.random.random_sample()  # noqa: NPY002

    def iter_lane(self, epoch: int, lane: int, num_lanes: int) -> Iterator[torch.Tensor]:
        return map(self.__getitem__, range(lane, 8, num_lanes))


@pytest.mark.parametrize("is_stream", [False, True])
def test_only_what_seeds_on_purpose_moves_the_generators(tmp_path, is_stream):
    """A script that seeded, opened its data and built its model got the same weights for every seed."""
    lanes = make_lanes(LocalWorld(torch.device("cpu")), global_batch_size=4)
    dataset: Any = Noisy()
    if is_stream:
        dataset = type("Stream", (), {"iter_lane": dataset.iter_lane})()
    torch.manual_seed(1)  # lanes seeded them, and a state that is set again would not show
    model = nn.Linear(3, 2)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    optimizer = torch.optim.AdamW(model.parameters())
    with unmoved_generators():
        lanes.prepare(model, ema_decay=0.9, init_from=str(tmp_path / "model.pt"))
        checkpoints = lanes.checkpoints(tmp_path / "checkpoints", model=model, optimizer=optimizer)
    with unmoved_generators():
        steps = lanes.steps(dataset)
    with unmoved_generators():
        for inputs in lanes.evaluate(dataset, metric := MeanMetric()):
            metric.update(model(inputs))
    step = next(iter(steps))
    with unmoved_generators(), step.replay(0) as inputs:
        model(inputs)
    for inputs in step:
        step.backward(model(inputs).square().mean())
    optimizer.step()
    with unmoved_generators():
        lanes.average(model).update(step)
        checkpoints.save(1)
        lanes.save_model(model, tmp_path / "model.safetensors")
        lanes.close()
