"""The example of next-item recommendation: the same bytes from any processes, by every reducer."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lanewise.config import DataConfig, DistributedConfig, OrderConfig, RunConfig
from lanewise.engine.engine import build_engine
from lanewise.processes.world.world import World
from lanewise.testing import run_distributed
from tests.distributed.commands.test_verify import module, start, verify
from tests.distributed.tasks import configure, train
from tests.slow import slow

pytest.importorskip("pyarrow")

EXAMPLE = Path(__file__).parents[3] / "examples" / "session_rec"


def import_sessions() -> Any:
    sys.path.insert(0, str(EXAMPLE))
    import sessions

    return sessions


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """75 sessions of 2 to 9 of 17 items in row groups of 3 to 17, and 20 held-out ones."""
    folder = tmp_path_factory.mktemp("sessions") / "data"
    items = [f"item {number}" for number in range(17)]
    sessions = [
        (f"session {number}", [items[(number * 5 + 3 * place) % 17] for place in range(2 + number * 7 % 8)])
        for number in range(95)
    ]
    parts = {"train": sessions[:75], "held_out": sessions[75:]}
    import_sessions().write_sessions(folder, items, parts, rows_per_group=10)
    return folder


def config_for(
    folder: Path, order: str = "blocked", *, task: str = "SessionRec", steps: int = 6, **distributed: Any
) -> RunConfig:
    """Steps of 16 in four lanes; the fifth one, with which an epoch ends, has 11 samples in three of them."""
    model = {"num_layers": 1, "num_heads": 2, "width": 16, "context": 5, "dropout": 0.2}
    config = configure(
        f"session_rec.{task}",
        num_lanes=4,
        micro_batch_size=4,
        steps=steps,
        folder=str(folder),
        model=model,
    )
    return replace(
        config,
        search_path=str(EXAMPLE),
        data=DataConfig(order=OrderConfig(class_path=order)),
        distributed=DistributedConfig(equality="exact", device_type="cpu", **distributed),
    )


def train_and_evaluate(world: World, config: RunConfig) -> Any:
    import_sessions()
    trained = train(world, config)
    evaluation = build_engine(config, world).evaluation
    assert evaluation is not None
    return trained, evaluation.run()[0]


@pytest.fixture(scope="module")
def alone(folder) -> Any:
    return run_distributed(train_and_evaluate, 1, config_for(folder))[0]


def test_the_values_are_those_of_the_ranking(alone):
    assert set(alone[1]) == {
        "held_out/loss",
        "held_out/last_item/recall_at_10",
        "held_out/last_item/ndcg_at_10",
        "held_out/last_item/mrr",
    }


@pytest.mark.parametrize(
    ("reducer", "num_processes", "devices"),
    [
        ("ddp", 3, 3),
        ("data_parallel", 1, 2),
        *slow(("ddp", 2, 2), ("fsdp", 2, 2), ("fsdp", 3, 3), ("balanced_data_parallel", 1, 3)),
    ],
)
def test_every_reducer_ends_with_the_bytes_and_the_values_of_one_process(
    folder, alone, reducer, num_processes, devices
):
    config = config_for(folder, reducer=reducer, devices=devices)
    assert run_distributed(train_and_evaluate, num_processes, config) == [alone] * num_processes


def test_sessions_of_like_lengths_together_give_other_bytes_and_the_same_on_two_processes(folder, alone):
    config = config_for(folder, "bucketed")
    results = run_distributed(train_and_evaluate, 2, config)
    assert results == run_distributed(train_and_evaluate, 1, config) * 2
    assert results[0] != alone


@pytest.mark.parametrize(
    ("reducer", "num_processes"), [("ddp", 2), pytest.param("fsdp", 3, marks=pytest.mark.slow)]
)
def test_with_negatives_of_the_step_bytes_and_values_are_those_of_one_process(
    folder, alone, reducer, num_processes
):
    (expected,) = run_distributed(train_and_evaluate, 1, config_for(folder, task="InBatchSessionRec"))
    assert expected[0] != alone[0]
    assert expected[1].keys() == alone[1].keys()
    config = config_for(folder, task="InBatchSessionRec", reducer=reducer, devices=num_processes)
    assert run_distributed(train_and_evaluate, num_processes, config) == [expected] * num_processes


@pytest.mark.slow
def test_verify_finds_nothing(folder, monkeypatch):
    monkeypatch.setattr(module, "start", start)  # faster than programs of their own
    monkeypatch.setattr(module, "prepare_workers", lambda *_: None)
    report = verify(config_for(folder), 2)
    assert report.is_verified
    assert report.notes == []
