"""Faults of the kind that only a late device shows, each planted and found.

A fault is found in some orders only, since what was forgotten may happen in time by chance. Unchanged code
leaves the same bytes in every order, as test_fake_device.py shows.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.fake_device.test_fake_device import NUM_STEPS, configured, on_cpu
from tests.distributed.reduce.test_reducers import Whole, train_part
from tests.distributed.tasks import train
from tests.fake_device.build import why_not
from tests.fake_device.device import ORDERS
from tests.fake_device.mutant import Mutant
from tests.fake_device.run import run

pytestmark = [
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
    pytest.mark.timeout(600),  # the first test builds the device
]

ACCELERATOR = "lanewise.processes.device.accelerator"
RANDOM_STATE = "lanewise.processes.device.random_state"
LANES = "lanewise.engine.step.lanes"
READER = "lanewise.data.lane_reader"
TREE = "lanewise.reduce.tree_all_reduce"
PART = "lanewise.runs.checkpoint.part"

FAULTS = [
    Mutant(
        "a value is read before its copy is there",
        ACCELERATOR,
        {"        copied.synchronize()\n": "        pass\n"},
        found_in="last",
    ),
    Mutant(
        "a copied tensor is not recorded on the stream that copies",
        ACCELERATOR,
        {"        tensor.record_stream(stream)\n": ""},
        found_in="main_first",
    ),
    Mutant(
        "a side stream does not wait for what it reads",
        ACCELERATOR,
        {
            "        stream.wait_stream(torch.accelerator.current_stream(device))\n    with": (
                "        pass\n    with"
            )
        },
        found_in="side_first",
    ),
    Mutant(
        "an event is recorded before the copy",
        ACCELERATOR,
        {
            "        host.copy_(tensor, non_blocking=True)\n": (
                "        early = torch.accelerator.current_stream(tensor.device).record_event()\n"
                "        host.copy_(tensor, non_blocking=True)\n"
            ),
            "        copied = stream.record_event()\n": "        copied = early\n",
        },
        task=Whole,  # of the other, each checksum is then NaN, so that the looks never end, and wait
        found_in="last",
    ),
    Mutant(
        "the seed goes to another device",
        RANDOM_STATE,
        {
            "        module.manual_seed(seed)\n": (
                "        module.native.default_generator(1).manual_seed(seed)\n"
            )
        },
        found_in="now",
    ),
    Mutant(
        "a thread keeps the default device",
        ACCELERATOR,
        {"        torch.accelerator.set_device_index(device)\n": "        pass\n"},
        layout="balanced_data_parallel",
        found_in="now",
    ),
    Mutant(
        "a batch is not recorded on the stream that computes",
        LANES,
        {"            moved.record_stream(torch.accelerator.current_stream(device))\n": "            pass\n"},
        found_in="side_first",
    ),
    Mutant(
        "a step does not wait for its batch",
        LANES,
        {"            torch.accelerator.current_stream(device).wait_stream(copying)\n": "            pass\n"},
        found_in="main_first",
    ),
    Mutant(
        "a pinned buffer is used again for the next batch",
        READER,
        {
            "    return leaf.pin_memory() if callable": (
                "    if isinstance(leaf, torch.Tensor):\n"
                "        empty = torch.empty(4096, dtype=torch.uint8, pin_memory=True)\n"
                "        buffer = vars(_pin).setdefault('buffer', empty)\n"
                "        return buffer[: leaf.nbytes].view(leaf.dtype).view(leaf.shape).copy_(leaf)\n"
                "    return leaf.pin_memory() if callable"
            )
        },
        found_in="last",
    ),
    Mutant(
        "a bucket is sent before it is full",
        TREE,
        {"                    self._stream.wait_event(ready)\n": "                    pass\n"},
        layout="ddp",
        found_in="last",
    ),
    Mutant(
        "a bucket is used before its sum is there",
        TREE,
        {
            "                future.set_result(summed.to(self._device))\n": (
                "            future.set_result(summed.to(self._device))\n"
            )
        },
        layout="ddp",
        found_in="main_first",
    ),
    Mutant(
        "a checkpoint is written before its copy is there",
        PART,
        {"            torch.accelerator.synchronize()\n": "            pass\n"},
        found_in="last",
    ),
    Mutant(
        "a snapshot is taken on another stream",
        PART,
        {
            "            staged.copy_(tensor, non_blocking=self._buffer.is_pinned())\n": (
                "            with torch.Stream(torch.accelerator.current_accelerator()):\n"
                "                staged.copy_(tensor, non_blocking=self._buffer.is_pinned())\n"
            )
        },
        found_in="side_first",
    ),
]


def train_with(world: Any, mutant: Mutant, config: Any, folder: str) -> Any:
    """Train with a fault; where it is in checkpoints, save in the middle and go on from there."""
    try:
        mutant.plant()
    except AssertionError as error:
        return f"not planted: {error}"
    if mutant.module != PART:
        return train(world, config)[0]
    train_part(world, config, folder, 3)
    return train_part(world, config, folder, NUM_STEPS)


def is_found(mutant: Mutant, order: str, folder: Path) -> bool:
    """Tell whether training with a fault fails, or leaves other bytes."""
    config = configured(mutant.task, mutant.layout)
    num_processes = config.distributed.num_processes or 1
    try:
        ended = run(train_with, num_processes, mutant, config, str(folder), order=order)
    except RuntimeError as error:
        print(str(error).strip().splitlines()[-1])
        return True
    assert not any(isinstance(one.value, str) for one in ended), ended[0].value
    return any(one.value != on_cpu(mutant.task)[0] for one in ended)


FAST = {
    "a value is read before its copy is there",
    "a copied tensor is not recorded on the stream that copies",
    "a batch is not recorded on the stream that computes",
    "a bucket is used before its sum is there",
}
"""What `make test` runs: a fault for each order, and one of the exchange."""


@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(mutant, marks=() if mutant.name in FAST else pytest.mark.slow, id=mutant.name)
        for mutant in FAULTS
    ],
)
def test_a_fault_is_found(tmp_path, mutant):
    assert is_found(mutant, mutant.found_in, tmp_path)


@pytest.mark.slow
def test_code_that_is_planted_without_a_fault_is_not_found(tmp_path):
    harmless = {
        "        copied.synchronize()\n": "        copied.synchronize()\n        copied.synchronize()\n"
    }
    assert not is_found(Mutant("no fault", ACCELERATOR, harmless), "random-1", tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mutant", FAULTS, ids=lambda mutant: mutant.name)
def test_in_which_orders_a_fault_is_found(tmp_path, mutant):
    found = [order for order in ORDERS if is_found(mutant, order, tmp_path / order)]
    print(f"{mutant.name} | {mutant.layout} | {', '.join(found)}")
    assert mutant.found_in in found
