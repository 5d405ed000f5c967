"""Builds what evaluates a model: the task's eval datasets, and when a run evaluates them."""

from torch import nn

from lanewise.config import RunConfig
from lanewise.data import LaneReader
from lanewise.engine.dataset import compare_datasets, count_samples
from lanewise.engine.evaluate import EvalSet, Evaluation, Evaluator
from lanewise.errors import ConfigError, DataError
from lanewise.lanes import BlockSchedule, Schedule
from lanewise.precision import Precision
from lanewise.reduce import Reducer
from lanewise.task import Task
from lanewise.world.world import World


def build_evaluator(
    config: RunConfig,
    task: Task,
    model: nn.Module,
    precision: Precision,
    world: World,
    reducer: Reducer | None = None,
) -> Evaluator | None:
    """Build what evaluates the task's eval datasets; None if it has none.

    Collective: every rank must call this, with the same configuration.

    Args:
        config: the run.
        task: the user's task.
        model: what is evaluated, on its device.
        precision: the number format of forward and loss.
        world: the processes.
        reducer: what has the model, where it is being trained.

    Raises:
        DataError: if a dataset is empty, or differs between ranks.
        TaskError: if a metric cannot be merged.
    """
    sets = []
    for name, dataset in task.eval_datasets().items():
        num_samples = count_samples(dataset)
        if not num_samples:
            raise DataError(f"the eval dataset {name} is empty. Check its path, or leave it out.")
        reader = LaneReader(dataset, task.collate, config.train.seed, eval_dataset=name)
        compare_datasets(reader, num_samples, world)
        schedule = BlockSchedule(num_samples, config.batch.num_lanes, config.batch.micro_batch_size)
        sets.append(EvalSet(name, reader, schedule))
    if not sets and config.evaluate.best is not None:
        raise ConfigError(
            f"evaluate.best is {config.evaluate.best}, but the task has nothing to evaluate. "
            "Give it eval_datasets, or leave the key out."
        )
    if not sets:
        return None
    return Evaluator(
        task,
        model,
        precision,
        sets,
        world,
        seed=config.train.seed,
        num_workers=config.data.num_workers,
        reducer=reducer,
    )


def build_evaluation(
    config: RunConfig, evaluator: Evaluator | None, schedule: Schedule, last_step: int
) -> Evaluation | None:
    """Build what evaluates while training; None where there is nothing to evaluate.

    Args:
        config: says how often, and which value is the best.
        evaluator: evaluates.
        schedule: knows where epochs end.
        last_step: the step before which training ends.

    Raises:
        ConfigError: if surely no evaluation gives the value of `evaluate.best`.
    """
    if evaluator is None:
        return None
    evaluate = config.evaluate
    every_steps = evaluate.every_steps or evaluate.every_epochs * schedule.steps_per_epoch
    return Evaluation(evaluator, every_steps, last_step, evaluate.best, evaluate.best_mode)
