"""The tasks of docs/step_state.py train what a loop on one device makes of the whole batch, everywhere."""

import ast
import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lanewise.config import DataConfig, DistributedConfig, OrderConfig, RunConfig
from lanewise.data.collate import collate
from lanewise.engine.engine import build_engine
from lanewise.lanes import after_update_seed, model_seed
from lanewise.processes.device.determinism import set_determinism
from lanewise.processes.device.random_state import set_random_state
from lanewise.processes.world.shards import whole
from lanewise.processes.world.world import World
from lanewise.testing import run_distributed
from tests.distributed.tasks import configure
from tests.slow import slow

PAGE = Path(__file__).parents[2] / "docs" / "step_state.py"
NUM_SAMPLES, LANES, MICRO_BATCH, STEPS = 53, 4, 4, 9


DTYPE = torch.float64
"""Of weights, buffers and samples; autocast leaves float64 as it is."""


def is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr)


TEXT = PAGE.read_text()
SOURCES = [ast.get_source_segment(TEXT, node) for node in ast.parse(TEXT).body if not is_text(node)]
for source in SOURCES:  # the classes belong to this module, so that a configuration can name them
    exec(source.replace("torch.float64", "DTYPE").replace(".double()", ".to(DTYPE)"))
NAMES = ["MoCo", "Dino", "Quantiser", "Experts", "Hard", "Clipped"]


def configured(name: str, equality: str, reducer: str, num_devices: int, precision: str) -> RunConfig:
    config = configure(
        f"{__name__}.{name}",
        num_lanes=LANES,
        micro_batch_size=MICRO_BATCH,
        steps=STEPS,
        optimizer="torch.optim.SGD",
        lr=0.1,
        precision=precision,
    )
    devices = num_devices if "data_parallel" in reducer else None
    distributed = DistributedConfig(equality=equality, reducer=reducer, device_type="cpu", devices=devices)
    data = DataConfig(order=OrderConfig(class_path="sequential"))
    return dataclasses.replace(config, distributed=distributed, data=data)


def train(world: World, config: RunConfig) -> dict[str, torch.Tensor]:
    globals()["DTYPE"] = torch.float64 if config.precision == "float32" else torch.float32
    set_determinism(config.distributed.equality, threads=1)
    engine = build_engine(config, world)
    for _ in engine.steps():
        pass
    return {name: whole(tensor).clone() for name, tensor in engine.training.model.state_dict().items()}


def train_all(world: World, configs: list[RunConfig]) -> list[dict[str, torch.Tensor]]:
    return [train(world, config) for config in configs]


def by_hand(name: str) -> dict[str, torch.Tensor]:
    """Train on the whole batch of each step, as on one device without lanes."""
    task = globals()[name]()
    set_random_state(model_seed(0))
    model, dataset = task.build_model(), task.train_dataset()
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1)
    size = LANES * MICRO_BATCH
    steps = [range(NUM_SAMPLES)[start : start + size] for start in range(0, NUM_SAMPLES, size)]
    for number in range(STEPS):
        chosen = steps[number % len(steps)]
        batch = collate([dataset[index] for index in chosen])
        loss = task.loss(task.forward(model, batch), batch)
        optimizer.zero_grad()
        (loss.sum / loss.weight).backward()
        optimizer.step()
        set_random_state(after_update_seed(0, number))
        step = SimpleNamespace(gathered=loss.gather, totals=loss.total, num_samples=len(chosen))
        with torch.no_grad():
            task.after_update(model, step)
    return model.state_dict()


@pytest.fixture(scope="module")
def alone() -> dict[str, dict[str, torch.Tensor]]:
    configs = [configured(name, "exact", "ddp", 1, "float32") for name in NAMES]
    return dict(zip(NAMES, run_distributed(train_all, 1, configs)[0], strict=True))


def test_the_file_has_six_tasks_of_at_most_40_lines():
    classes = [source for source in SOURCES if source.startswith("class ")]
    assert [source.split("(")[0].removeprefix("class ") for source in classes] == NAMES
    assert max(source.count("\n") for source in classes) <= 40


@pytest.mark.parametrize("name", NAMES)
def test_it_trains_what_a_loop_makes_of_the_whole_batch(alone, name):
    expected = by_hand(name)
    assert alone[name].keys() == expected.keys()
    for key, tensor in expected.items():
        torch.testing.assert_close(alone[name][key], tensor, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("num_processes", "one_machine", "reducer"),
    [
        (3, True, "ddp"),
        (2, True, "fsdp"),
        (1, True, "data_parallel"),
        *slow((2, False, "ddp"), (4, True, "ddp"), (3, True, "fsdp"), (1, True, "balanced_data_parallel")),
    ],
)
def test_it_is_the_same_on_any_number_of_devices(alone, num_processes, one_machine, reducer):
    configs = [configured(name, "exact", reducer, 3, "float32") for name in NAMES]
    for of_rank in run_distributed(train_all, num_processes, configs, one_machine=one_machine):
        for name, state in zip(NAMES, of_rank, strict=True):
            different = [key for key in state if not torch.equal(state[key], alone[name][key])]
            assert (name, different) == (name, [])


def test_in_bf16_it_is_the_same_on_any_number_of_processes():
    configs = [configured(name, "exact", "ddp", 1, "bf16") for name in NAMES]
    (expected,) = run_distributed(train_all, 1, configs)
    for of_rank in run_distributed(train_all, 3, configs):
        for name, state, alone in zip(NAMES, of_rank, expected, strict=True):
            assert alone[next(iter(alone))].dtype == torch.float32
            assert (name, [key for key in state if not torch.equal(state[key], alone[key])]) == (name, [])


@pytest.mark.parametrize("num_processes", [3, *slow(2, 4)])
def test_in_close_it_differs_by_rounding(alone, num_processes):
    configs = [configured(name, "close", "ddp", 1, "float32") for name in NAMES]
    first, *others = run_distributed(train_all, num_processes, configs)
    for name, state in zip(NAMES, first, strict=True):
        for key, tensor in state.items():
            torch.testing.assert_close(tensor, alone[name][key], rtol=0, atol=1e-12)
            for of_rank in others:
                assert torch.equal(of_rank[NAMES.index(name)][key], tensor), (name, key)
