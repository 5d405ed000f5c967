"""A steady step asks no more of an accelerator than a loop by hand, but for the bytes of a division.

Counted is every operator that would be a kernel or a copy. Memory that is read and written is given as a
multiple of the gradient's.
"""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lanewise.engine.engine import build_engine
from lanewise.processes.device.determinism import set_determinism
from tests.distributed.tasks import configure
from tests.fake_device.build import why_not
from tests.fake_device.run import run
from tests.fake_device.tasks import Words
from tests.slow import slow

pytestmark = [
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
    pytest.mark.timeout(600),  # the first test builds the device
]

NUM_LANES, MICRO_BATCH_SIZE, NUM_WARM, NUM_COUNTED = 4, 2, 3, 2
VIEWS_AND_MEMORY = {
    *(
        "view",
        "_unsafe_view",
        "reshape",
        "_reshape_alias",
        "t",
        "transpose",
        "permute",
        "select",
        "slice",
        "expand",
    ),
    *(
        "unsqueeze",
        "squeeze",
        "as_strided",
        "alias",
        "detach",
        "detach_",
        "unbind",
        "split",
        "split_with_sizes",
    ),
    *(
        "empty",
        "empty_like",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "set_",
        "resize_",
        "lift_fresh",
    ),
    *("record_stream", "is_pinned", "pin_memory", "_pin_memory", "_local_scalar_dense", "unflatten"),
}
"""Operators that launch nothing."""


@dataclass(frozen=True)
class Asked:
    """What a step asked of the device; memory as a multiple of the gradient's."""

    operators: Counter[str]
    read: float
    written: float


class Counting(TorchDispatchMode):
    """Counts operators on tensors that are not of the host."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: Counter[str] = Counter()
        self.read = self.written = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operator(*args, **(kwargs or {}))
        schema = operator._schema
        name = schema.name.removeprefix("aten::")
        inputs, outputs = tensors((args, kwargs)), tensors(result)
        if name in VIEWS_AND_MEMORY or all(one.is_cpu for one in inputs + outputs):
            return result
        changed = [
            value
            for argument, value in zip(schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        self.operators[name] += 1
        self.read += sum(one.nbytes for one in inputs)
        self.written += sum(one.nbytes for one in tensors(changed) or outputs)
        return result

    def of_a_step(self, model: nn.Module) -> Asked:
        gradient = sum(parameter.nbytes for parameter in model.parameters()) * NUM_COUNTED
        operators = Counter({name: count / NUM_COUNTED for name, count in self.operators.items()})
        return Asked(operators, self.read / gradient, self.written / gradient)


def tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def by_hand(world: Any) -> Asked:
    """Take steps as a careful loop does, with the optimizer that `exact` has."""
    set_determinism("exact", threads=1)
    task, device = Words(), world.device
    model = task.build_model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    sentences = [batch.pin_memory() for batch in micro_batches(task)]
    num_words = sum(batch.numel() for batch in sentences)

    def step() -> None:
        for batch in sentences:
            moved = batch.to(device, non_blocking=True)
            total = nn.functional.cross_entropy(model(moved).flatten(0, 1), moved.flatten(), reduction="sum")
            (total / num_words).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()

    return counted(step, model)


def micro_batches(task: Words) -> list[torch.Tensor]:
    dataset = task.train_dataset()
    starts = range(0, NUM_LANES * MICRO_BATCH_SIZE, MICRO_BATCH_SIZE)
    return [task.collate([dataset[start + number] for number in range(MICRO_BATCH_SIZE)]) for start in starts]


def by_lanewise(world: Any, equality: str) -> Asked:
    set_determinism(equality, threads=1)
    config = configure(
        Words,
        num_lanes=NUM_LANES,
        micro_batch_size=MICRO_BATCH_SIZE,
        equality=equality,
        steps=100,
        log_every_steps=100,
    )
    foreach = replace(config.optimizer, init_args={"lr": 1e-2, "foreach": True})
    engine = build_engine(replace(config, optimizer=foreach), world)
    steps = engine.steps()
    return counted(lambda: next(steps), engine.training.model)


def counted(step: Any, model: nn.Module) -> Asked:
    for _ in range(NUM_WARM):
        step()
    counting = Counting()
    with counting:
        for _ in range(NUM_COUNTED):
            step()
    return counting.of_a_step(model)


@pytest.mark.parametrize("equality", ["exact", *slow("close")])
def test_a_step_asks_no_more_of_the_device_than_a_loop_by_hand(equality):
    """The tree adds the lanes' gradients by bucket; what is left over is the division by the weight."""
    (hand,) = run(by_hand, 1)
    (ours,) = run(by_lanewise, 1, equality)
    more = ours.value.operators - hand.value.operators
    assert ours.value.operators.total() <= hand.value.operators.total(), more
    assert ours.value.read - hand.value.read <= 1.1, more
    assert ours.value.written - hand.value.written <= 1.1, more
