"""The examples, in `exact` and in either precision."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lanewise.config import ActivationCheckpointingConfig, DistributedConfig, MemoryConfig
from lanewise.testing import run_distributed
from tests.distributed.tasks import configure, train

EXAMPLES = Path(__file__).parents[3] / "examples"
NUM_DIGITS = 74


def train_example(world, name, configs):
    sys.path.insert(0, str(EXAMPLES / name))
    return [train(world, config) for config in configs]


def write_idx(path: Path, values: np.ndarray) -> None:
    shape = np.array(values.shape, ">u4").tobytes()
    path.write_bytes(bytes([0, 0, 8, values.ndim]) + shape + values.tobytes())


def write_digits(root: Path) -> None:
    generator = np.random.default_rng(0)
    for name in ("train", "t10k"):
        write_idx(
            root / f"{name}-images-idx3-ubyte", generator.integers(256, size=(NUM_DIGITS, 28, 28), dtype="u1")
        )
        write_idx(root / f"{name}-labels-idx1-ubyte", generator.integers(10, size=NUM_DIGITS, dtype="u1"))


def configure_example(name, folder, precision):
    # 74 samples in steps of 32: the third of an epoch has 10 of them, on 3 of 8 lanes.
    options = {"micro_batch_size": 4, "steps": 4, "precision": precision}
    if name == "mnist":
        write_digits(folder)
        return configure("mnist.Mnist", root=str(folder), **options)
    text = folder / "text.txt"
    text.write_text("What is the same on one device and on many? " * 30, encoding="utf-8")
    model = {"num_layers": 2, "num_heads": 2, "width": 16, "context": 16, "dropout": 0.2}
    return configure("char_gpt.CharGPT", path=str(text), model=model, **options)


@pytest.mark.parametrize("world_sizes", [(3,), pytest.param((2, 4), marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["char_gpt", "mnist"])
def test_one_to_four_processes_give_the_same_bytes_in_either_precision(tmp_path, name, world_sizes):
    configs = [configure_example(name, tmp_path, precision) for precision in ("float32", "bf16")]
    alone = run_distributed(train_example, 1, name, configs)[0]
    assert alone[0] != alone[1]
    for world_size in world_sizes:
        for result in run_distributed(train_example, world_size, name, configs):
            assert result == alone


CHECKPOINTED = {
    "char_gpt": ActivationCheckpointingConfig(),
    "mnist": ActivationCheckpointingConfig(blocks=("layers.*",)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKPOINTED)
def test_layers_that_run_again_change_no_byte_under_any_reducer(tmp_path, name):
    configs = [configure_example(name, tmp_path, precision) for precision in ("float32", "bf16")]
    plain = run_distributed(train_example, 1, name, configs)[0]
    memory = MemoryConfig(activation_checkpointing=CHECKPOINTED[name])
    for reducer, num_processes, devices in (
        ("single", 1, 1),
        ("data_parallel", 1, 2),
        ("balanced_data_parallel", 1, 3),
        ("ddp", 2, 2),
        ("ddp", 3, 3),
        ("fsdp", 2, 2),
        ("fsdp", 3, 3),
    ):
        layout = DistributedConfig(reducer=reducer, devices=devices, equality="exact", device_type="cpu")
        checkpointed = [replace(config, memory=memory, distributed=layout) for config in configs]
        for result in run_distributed(train_example, num_processes, name, checkpointed):
            assert result == plain, (reducer, devices)
