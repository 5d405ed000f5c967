"""What the processes of `lanewise bench` do: the first steps of the run, and then turns without end."""

from dataclasses import asdict, replace

import pytest

from lanewise.commands.bench import job
from lanewise.commands.bench.job import NUM_FIRST_STEPS, BenchTurn, First, digest_of
from lanewise.config import DataConfig, RunConfig, SchedulerConfig
from lanewise.engine.engine import build_engine
from lanewise.processes.device.determinism import set_determinism
from lanewise.processes.world.world import World
from lanewise.testing import run_distributed
from tests.distributed.commands.test_stream_verify import Lanes, Learns, Plain
from tests.distributed.tasks import Smooth, configure
from tests.slow import slow


def measure(world: World, config: RunConfig) -> tuple[list[First], list[list[BenchTurn]]]:
    set_determinism("exact", threads=1)
    measured = job._MeasuredRun(job.BenchJob(config), world)
    firsts = [First(**first) for first in world.all_gather_tree(asdict(measured.first))]
    num_steps, rounds = job.LEAST_STEPS, []
    for _ in range(1 + job.LEAST_ROUNDS):  # the first one tells how long the others are
        turns = world.all_gather_tree(asdict(measured.take_turn(num_steps)))
        rounds.append([BenchTurn(**turn) for turn in turns])
        num_steps = job.steps_of_turn(rounds[-1])
    return firsts, rounds[1:]


def train(world: World, config: RunConfig) -> str:
    set_determinism("exact", threads=1)
    engine = build_engine(config, world)
    list(engine.steps())
    return digest_of(engine.training.model)


@pytest.mark.parametrize("num_processes", [*slow(1, 2), 3])
def test_the_model_is_that_of_a_run_after_the_first_steps(num_processes):
    config = configure(Smooth, num_lanes=4, steps=NUM_FIRST_STEPS)
    (trained,) = run_distributed(train, 1, config)
    ((firsts, _), *_) = run_distributed(measure, num_processes, config)
    assert {first.model for first in firsts} == {trained}
    assert [first.rank for first in firsts] == list(range(num_processes))


@pytest.mark.parametrize(
    ("name", "init_args"),
    [("OneCycleLR", {"max_lr": 0.1, "total_steps": "auto"}), *slow(("ReduceLROnPlateau", {}))],
)
def test_turns_go_on_after_the_last_step_of_the_run(name, init_args):
    """OneCycleLR raises an error in the step after its last one; ReduceLROnPlateau follows an evaluation."""
    scheduler = SchedulerConfig(class_path=f"torch.optim.lr_scheduler.{name}", init_args=init_args)
    config = replace(configure(Smooth, num_lanes=4, steps=20), scheduler=scheduler)
    ((firsts, rounds),) = run_distributed(measure, 1, config)
    assert len(rounds) >= 5
    assert sum(turn.num_steps for turns in rounds for turn in turns) > 20
    assert firsts[0].peak_bytes[0] > 0


@pytest.mark.parametrize("stream", [*slow(Lanes), Plain])
def test_turns_on_a_stream_go_on_after_its_last_epoch_and_count_its_samples(stream):
    config = configure(Learns, num_lanes=4, stream=stream.__name__)
    config = replace(config, train=replace(config.train, max_steps=None, epochs=1))
    for firsts, rounds in run_distributed(measure, 2, config):
        assert len({first.model for first in firsts}) == 1
        assert len(rounds) >= 5
        for turn in rounds[-1]:
            assert turn.num_steps <= turn.num_samples == turn.num_units <= 8 * turn.num_steps


def test_a_turn_counts_what_was_trained_and_splits_its_time():
    config = configure(Smooth, num_lanes=4, micro_batch_size=2)
    for _, rounds in run_distributed(measure, 2, config):
        for turn in rounds[-1]:
            assert 0 < turn.num_samples <= 8 * turn.num_steps
            assert turn.num_units > 0
            assert 0 < sum(turn.phases.values()) <= turn.seconds * 1.01


def test_ranks_with_unequal_lanes_take_as_many_steps_as_each_other():
    """Each skipped the steps that its own loader might have read ahead, and they waited for each other."""
    config = replace(configure(Smooth, num_lanes=3), data=DataConfig(num_workers=1))
    for firsts, rounds in run_distributed(measure, 2, config):
        assert len(rounds) >= 5
        assert firsts[0].peak_bytes == []
