"""Whether what a lane computes depends on what was computed before it."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from lanewise.config import RunConfig
from lanewise.data import LaneReader, digest
from lanewise.engine.evaluation.evaluator import EvalSet, Evaluator
from lanewise.engine.samples.dataset import count_samples
from lanewise.engine.step.lane import LaneRunner
from lanewise.lanes import Placement, SequentialSchedule
from lanewise.reduce import Reducer
from lanewise.verify.hidden import changed, hidden_state, numbers_that_matter
from lanewise.verify.probed_run import ProbedRun
from lanewise.world.world import LocalWorld, World

_NUM_AGAIN = 16
_SECONDS = 2.0


@dataclass(frozen=True)
class History:
    """What the first lane's micro-batch gave after other things; weights, buffers, random state are equal."""

    found: str
    """After what it gave something else, as part of a sentence; empty where it never did."""
    changed: Sequence[str]
    """Values outside of parameters and buffers that all this changed."""
    num_runs: int
    buffers: Sequence[str] = ()
    """Buffers that an evaluation changes, and by which later micro-batches of it give something else."""

    def __str__(self) -> str:
        return (
            f"the first lane's micro-batch, {self.found}, gives a different loss or gradient from equal "
            "weights, buffers and random state"
        )


def probe_history(
    config: RunConfig, probed: ProbedRun, batch: Any, result: str, hidden: Mapping[str, str]
) -> History:
    """Run the first lane's micro-batch many times, after another one, after an evaluation, in a new model.

    Where a first look saw nothing change, as often as two seconds allow.

    Args:
        config: the run.
        probed: whose first lane was run twice, alike.
        batch: its micro-batch.
        result: what it gave.
        hidden: the state before the first run.
    """
    other = probed.read(probed.other_turn)
    num_runs = 2

    def run(who: ProbedRun) -> bool:
        nonlocal num_runs
        num_runs += 1
        return who.run(who.turn, batch) == result

    def names() -> list[str]:
        return changed(hidden, hidden_state(probed.model, task=probed.task))

    def ways() -> Iterator[str]:
        """Do something else before each run, and say what it was."""
        is_changing = bool(names())
        end = time.monotonic() + _SECONDS
        for number in range(_NUM_AGAIN):
            yield f"run {number + 3} times"
            if not is_changing and time.monotonic() > end:
                break
        probed.run(probed.other_turn, other)
        yield "run after another micro-batch"
        if _evaluates(probed, config):
            yield "run after an evaluation"
        with probed.other_weights(0):
            probed.run(probed.turn, batch)
        yield "run after a run with other weights"

    for way in ways():
        if not run(probed):
            return History(way, names(), num_runs)
    found = names()
    far = numbers_that_matter(lambda: run(probed), probed.model, task=probed.task) if found else []
    if far:
        return History(f"run while {', '.join(far[:3])} is far off", far, num_runs)
    new = ProbedRun(config, probed.device)
    new.run(new.other_turn, other)
    if not run(new):
        return History("run in a new model after another micro-batch", found, num_runs)
    buffers = _changed_by_evaluation(probed, batch, other) if probed.task.eval_datasets() else ()
    return History("", found, num_runs, buffers)


def _changed_by_evaluation(probed: ProbedRun, batch: Any, other: Any) -> Sequence[str]:
    """Return the buffers that matter to an evaluation, and that it changes: nothing puts them back within."""
    turns = (probed.turn, batch), (probed.other_turn, other), (probed.turn, batch)
    before = {name: digest(value) for name, value in probed.model.named_buffers()}
    losses = []
    probed.model.eval()
    try:
        with probed.kept_state(), torch.no_grad():
            for turn, data in turns:
                loss = probed.lane(turn, data).run(probed.model)
                losses.append(digest(loss.sum, loss.weight))
            after = {name: digest(value) for name, value in probed.model.named_buffers()}
    except Exception:  # noqa: BLE001 - training data need not be what is evaluated
        return ()
    finally:
        probed.model.train()
    return changed(before, after) if losses[0] != losses[2] else ()


def _evaluates(probed: ProbedRun, config: RunConfig) -> bool:
    """Evaluate, and tell whether there was something to evaluate."""
    world, sets = LocalWorld(probed.device), probed.task.eval_datasets()
    try:
        return bool(evaluate_first_batch(probed.lanes, probed.model, sets, world, config))
    except Exception:  # noqa: BLE001 - the steps that are run evaluate as well, and say what failed
        return False


def evaluate_first_batch(
    lanes: LaneRunner,
    model: nn.Module,
    datasets: Mapping[str, Dataset[Any]],
    world: World,
    config: RunConfig,
    *,
    reducer: Reducer | None = None,
    has_metrics: bool = True,
) -> dict[str, float]:
    """Evaluate at most a global batch of each dataset; see `Evaluator` and `EvalSet`.

    Collective: every rank must call this.
    """
    batch, sets = config.batch, []
    for name, dataset in datasets.items():
        num_samples = min(count_samples(dataset), batch.global_batch_size)
        schedule = SequentialSchedule(num_samples, batch.num_lanes, batch.samples_per_lane)
        reader = LaneReader(dataset, lanes.task.collate, config.train.seed, eval_dataset=name)
        sets.append(EvalSet(name, reader, schedule, has_metrics))
    placement = Placement.of(batch.num_lanes, world)
    return Evaluator(lanes, model, sets, world, placement, reducer=reducer).run() if sets else {}
