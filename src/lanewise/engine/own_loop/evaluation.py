"""Evaluates in the user's own loop: yields the micro-batches of a dataset, and merges the metrics."""

from collections import ChainMap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from lanewise.engine.buffers.pack import evaluating
from lanewise.engine.evaluation.eval_set import build_eval_set, no_sample
from lanewise.engine.own_loop.steps import Prepared
from lanewise.lanes import evaluation_seed
from lanewise.metrics import LaneMetrics, check_metrics, load_merged
from lanewise.processes.device.random_state import kept_random_state, set_random_state
from lanewise.processes.world.world import World

if TYPE_CHECKING:
    from torchmetrics import Metric


def evaluated(
    dataset: Any, metrics: Sequence["Metric"], prepared: Prepared, world: World, num_workers: int, **cut: Any
) -> Iterator[Any]:
    """Yield the micro-batches of this process's lanes; see `Lanes.evaluate`. Collective.

    Args:
        dataset: map-style or a stream.
        metrics: which the loop updates.
        prepared: the models, whose buffers are put back.
        world: the processes.
        num_workers: number of loader processes.
        cut: how `build_eval_set` collates, cuts and reads it.
    """
    named = {str(number): metric.to(world.device) for number, metric in enumerate(metrics)}
    check_metrics(named)
    of_lanes, placement, num_samples = LaneMetrics(named), prepared.spread.placement, 0
    with evaluating(prepared.passes), kept_random_state():
        name, seed = type(dataset).__name__, prepared.seed
        eval_set = build_eval_set(name, dataset, seed=seed, world=world, placement=placement, **cut)
        for batch in eval_set.batches(placement.own, world.device, num_workers=num_workers):
            turn = batch.turn
            if not turn.positions:
                continue
            of_lanes.turn_to(turn.lane)
            num_samples += batch.num_samples
            if batch.has_samples:
                set_random_state(evaluation_seed(seed, turn.step, turn.lane))
                yield batch.data
            if turn.is_last:
                of_lanes.end_lane()
    counted, numbers = zip(*world.all_gather_tree((of_lanes.counted, num_samples)), strict=True)
    states = ChainMap(*counted)
    if not any(numbers):
        raise no_sample(eval_set.name)
    load_merged(named, [states[lane] for lane in sorted(states)])
