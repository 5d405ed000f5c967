"""`exact` on an accelerator: any number of processes and devices give the bytes of a single process."""

import shutil
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

from lanewise import Loss
from lanewise.config import DistributedConfig, FSDPConfig
from lanewise.engine.engine import build_engine
from lanewise.processes.device.determinism import set_determinism
from tests.distributed.tasks import Language, configure, train
from tests.integration.command import MNIST
from tests.unit.reduce.lanes import cancelling, in_tree, reduce_lanes

SIZES = [3, 1000, 300_000, 5]


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_transformer_ends_with_the_same_bytes_and_losses(device, world_size):
    (alone,) = device.run(train, 1, configure(Language))
    for result in device.run(train, world_size, configure(Language)):
        assert result == alone


def reduce_on_device(world):
    def value(lane: int, size: int) -> torch.Tensor:
        return cancelling(lane, size).to(world.device)

    gradients = reduce_lanes(world, value, SIZES, equality="exact", num_lanes=5)
    return [gradient.cpu().numpy().tobytes() for gradient in gradients]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_reducer_adds_in_the_tree(device, world_size):
    expected = [value.numpy().tobytes() for value in in_tree(cancelling, SIZES, 5, range(5))]
    for result in device.run(reduce_on_device, world_size):
        assert result == expected


@pytest.mark.parametrize("precision", ["bf16", "fp16", "tf32"])
def test_every_format_ends_with_the_same_bytes(device, precision):
    if precision == "tf32" and device.type != "cuda":
        pytest.skip("tf32 is a format of CUDA's")
    config = configure(Language, precision=precision)
    (alone,) = device.run(train, 1, config)
    for result in device.run(train, 2, config):
        assert result == alone


@pytest.mark.parametrize("precision", ["float32", "bf16", "fp16"])
@pytest.mark.parametrize("reducer", ["ddp", "fsdp", "data_parallel", "balanced_data_parallel"])
def test_each_reducer_on_devices_of_their_own_ends_with_the_bytes_of_one(device, reducer, precision):
    """On as many devices as there are, but four; over nccl where they are GPUs."""
    num_devices = min(device.count, 4)
    if num_devices < 2:
        pytest.skip("needs two devices")
    config = configure(Language, precision=precision)
    section = DistributedConfig(
        equality="exact",
        devices=num_devices,
        device_type=device.type,
        reducer=reducer,
        fsdp=FSDPConfig(blocks=("TransformerEncoderLayer",)),
    )
    (alone,) = device.run_apart(train, 1, config)
    several = replace(config, distributed=section)
    for result in device.run_apart(train, section.num_processes or 1, several):
        assert result == alone


def train_without_waiting(world):
    """After two steps, make every operation that waits for the device an error."""
    module = torch.get_device_module(world.device)
    set_determinism("close", threads=1)
    steps = build_engine(configure(NeverWaits, equality="close", steps=6), world).steps()
    reports = [next(steps), next(steps)]
    warnings.simplefilter("ignore")  # this mode of CUDA's calls itself a prototype
    module.set_sync_debug_mode("error")
    try:
        reports += [next(steps) for _ in range(3)]
    finally:
        module.set_sync_debug_mode("default")
    return [float(report.interval.grad_norm()) for report in reports], reports[-1].interval.times().phases


class NeverWaits(Language):
    """Its weight is a number on the host, and its model looks at no value."""

    def build_model(self):
        return nn.Sequential(nn.Embedding(31, 16), nn.Linear(16, 16), nn.Dropout(0.1), nn.Linear(16, 31))

    def loss(self, outputs, batch):
        total = nn.functional.cross_entropy(outputs.flatten(0, 1), batch.flatten(), reduction="sum")
        return Loss(total, batch.numel())


def test_a_step_does_not_wait_for_the_device(device):
    ((norms, seconds),) = device.run(train_without_waiting, 1)
    assert all(norm > 0 for norm in norms)
    assert set(seconds) == {"data", "forward", "backward", "communication", "optimizer"}
    assert all(spent >= 0 for spent in seconds.values())


def model_of(device, folder, *overrides):
    """Train the MNIST example for some steps by the command line; return the bytes of its model."""
    folder.mkdir(exist_ok=True)
    run_dir = folder / "run"
    length = ("--train.epochs", "null", "--train.max_steps", "12")
    options = ("--train.run_dir", run_dir, "--distributed.device_type", device.type)
    device.lanewise(folder, "train", MNIST, *length, *options, *overrides)
    return (run_dir / "model.safetensors").read_bytes()


def test_two_processes_on_one_card_leave_the_bytes_of_one(device, tmp_path):
    if device.type != "cuda":
        pytest.skip("gloo shares no such device")
    alone = model_of(device, tmp_path / "one")
    assert model_of(device, tmp_path / "two", "--distributed.devices", "[cuda:0, cuda:0]") == alone


@pytest.mark.parametrize("reducer", ["data_parallel", "balanced_data_parallel"])
@pytest.mark.parametrize("num_devices", [2, 3])
def test_several_devices_in_one_process_leave_the_bytes_of_one(device, tmp_path, reducer, num_devices):
    """On as many as there are; one that is named several times lets its lanes take turns."""
    names = [f"{device.type}:{number % device.count}" for number in range(num_devices)]
    alone = model_of(device, tmp_path / "one")
    several = ("--distributed.devices", f"[{', '.join(names)}]", "--distributed.reducer", reducer)
    assert model_of(device, tmp_path / "several", *several) == alone


@pytest.mark.parametrize("reducer", ["ddp", "fsdp"])
def test_two_processes_leave_the_bytes_of_one(device, tmp_path, reducer):
    """On GPUs over NCCL, which needs one for each process."""
    if device.count < 2:
        pytest.skip("needs two devices")
    alone = model_of(device, tmp_path / "one")
    several = ("--distributed.devices", "2", "--distributed.reducer", reducer)
    assert model_of(device, tmp_path / "two", *several) == alone


@pytest.mark.parametrize("reducer", ["ddp", "fsdp"])
def test_a_run_goes_on_on_another_number_of_devices(device, tmp_path, reducer):
    """From two to one, over NCCL where they are GPUs, in the middle of an epoch."""
    if device.count < 2:
        pytest.skip("needs two devices")
    alone = model_of(device, tmp_path / "one")
    several = ("--distributed.devices", "2", "--distributed.reducer", reducer)
    saves = ("--checkpoint.every.steps", "5", "--checkpoint.keep_last", "3")
    model_of(device, tmp_path / "moved", *saves, *several)
    for later in ("step-000010", "step-000012"):
        shutil.rmtree(tmp_path / "moved" / "run" / "checkpoints" / later)
    assert model_of(device, tmp_path / "moved", *saves, "--distributed.devices", "1", "--resume") == alone


def test_fsdp_that_offloads_leaves_the_same_bytes(device, tmp_path):
    if device.count < 2:
        pytest.skip("needs two devices")
    close = ("--distributed.devices", "2", "--distributed.reducer", "fsdp", "--distributed.equality", "close")
    kept = model_of(device, tmp_path / "kept", *close)
    offload = ("--distributed.fsdp.cpu_offload", "true")
    assert model_of(device, tmp_path / "offloaded", *close, *offload) == kept


def test_verify_finds_all_layouts_equal(device, tmp_path):
    """It ends with an error if one differs."""
    section = ("--distributed.device_type", device.type)
    device.lanewise(tmp_path, "verify", MNIST, "--devices", f"1,{min(device.count, 2)}", *section)
