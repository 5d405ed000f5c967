"""Builds an engine from a configuration and the user's Task."""

import inspect
import logging
from collections.abc import Sized
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lanewise.config import RunConfig
from lanewise.config.class_path import resolve_class
from lanewise.config.classes import build
from lanewise.data import LaneLoader, LaneReader, fingerprint
from lanewise.engine.engine import Engine
from lanewise.engine.evaluate import EvalSet, Evaluation, Evaluator
from lanewise.engine.step import Training, TrainStep
from lanewise.errors import ConfigError, DataError, TaskError
from lanewise.lanes import BlockSchedule, Order, Schedule, lane_blocks, model_seed
from lanewise.precision import Precision
from lanewise.random_state import set_random_state
from lanewise.reduce import build_reducer
from lanewise.task import Task
from lanewise.world.world import World

logger = logging.getLogger(__name__)


def build_engine(config: RunConfig, world: World) -> Engine:
    """Build everything that a run needs on this process.

    Collective: every rank must call this, with the same configuration.

    Raises:
        ConfigError: if a class in the configuration is not what its section needs.
        DataError: if the dataset is empty, or differs between ranks.
        TaskError: if the model has nothing to train.
        WorldError: if the ranks built different models.
    """
    resolve_class("task", config.task)  # before seeding: a module may seed a generator when it is imported
    set_random_state(model_seed(config.train.seed))
    task = build(config.task)
    if not isinstance(task, Task):
        raise ConfigError(f"task.class_path must name a lanewise.Task: {config.task.class_path} is not one.")
    # Again, so that the weights don't depend on what the task's constructor drew.
    set_random_state(model_seed(config.train.seed))
    model = task.build_model().to(world.device)
    exact = config.distributed.equality == "exact"
    reducer = build_reducer(model, config.batch.num_lanes, world, exact=exact)
    optimizer, scheduler = _build_optimizer(config, task, model)
    precision = Precision(config.precision, world.device.type)
    training = Training(task, model, optimizer, scheduler, precision)

    dataset = task.train_dataset()
    num_samples = _count(dataset)
    schedule = Schedule(
        num_samples, config.batch.global_batch_size, config.batch.micro_batch_size, config.data.drop_last
    )
    if not schedule.steps_per_epoch:
        raise DataError(
            f"no step can be made of the training dataset: it has {num_samples} samples, a step takes "
            f"{config.batch.global_batch_size}"
            + (" and drop_last is set." if num_samples else ". Check its path.")
        )
    reader = LaneReader(dataset, task.collate, config.train.seed)
    _compare_datasets(reader, num_samples, world)
    lanes = lane_blocks(schedule.num_lanes, world.world_size)[world.rank]
    order = Order(num_samples, seed=config.train.seed, shuffle=config.data.shuffle)
    loader = LaneLoader(reader, schedule, order, lanes, num_workers=config.data.num_workers)

    train_step = TrainStep(
        training,
        reducer,
        world,
        num_lanes=schedule.num_lanes,
        seed=config.train.seed,
        max_grad_norm=config.train.max_grad_norm,
    )
    last_step = _last_step(config, schedule)
    evaluator = build_evaluator(config, task, model, precision, world)
    evaluation = None
    if evaluator is not None:
        every_steps = config.evaluate.every_steps or config.evaluate.every_epochs * schedule.steps_per_epoch
        evaluation = Evaluation(
            evaluator, every_steps, last_step, config.evaluate.best, config.evaluate.best_mode
        )
    if world.rank == 0:
        _describe(config, schedule, world, last_step)
    return Engine(training, train_step, loader, schedule, reducer, world, last_step, evaluation)


def build_evaluator(
    config: RunConfig, task: Task, model: torch.nn.Module, precision: Precision, world: World
) -> Evaluator | None:
    """Build what evaluates the task's eval datasets; None if it has none.

    Collective: every rank must call this, with the same configuration.

    Raises:
        DataError: if a dataset is empty, or differs between ranks.
        TaskError: if a metric cannot be merged.
    """
    sets = []
    for name, dataset in task.eval_datasets().items():
        num_samples = _count(dataset)
        if not num_samples:
            raise DataError(f"the eval dataset {name} is empty. Check its path, or leave it out.")
        reader = LaneReader(dataset, task.collate, config.train.seed)
        _compare_datasets(reader, num_samples, world)
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
        num_lanes=config.batch.num_lanes,
        seed=config.train.seed,
        num_workers=config.data.num_workers,
    )


def _build_optimizer(
    config: RunConfig, task: Task, model: torch.nn.Module
) -> tuple[Optimizer, LRScheduler | None]:
    """Build the optimizer over the task's parameter groups, and the scheduler over the optimizer."""
    optimizer = build(config.optimizer, task.parameter_groups(model))
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"optimizer.class_path must name a torch.optim.Optimizer: got {config.optimizer.class_path}."
        )
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ConfigError(
            f"{config.optimizer.class_path} evaluates the loss several times a step, which is not supported. "
            "Use an optimizer whose step() needs no closure."
        )
    if config.scheduler is None:
        return optimizer, None
    scheduler = build(config.scheduler, optimizer)
    if not isinstance(scheduler, LRScheduler) or isinstance(scheduler, ReduceLROnPlateau):
        raise ConfigError(
            "scheduler.class_path must name an LRScheduler of torch that needs no metric: "
            f"got {config.scheduler.class_path}."
        )
    return optimizer, scheduler


def _count(dataset: Any) -> int:
    if not isinstance(dataset, Sized) or not hasattr(dataset, "__getitem__"):
        raise TaskError(
            f"a dataset of the task must be map-style: got {type(dataset).__name__}. "
            "Lanes read samples by index, so it needs __len__ and __getitem__."
        )
    return len(dataset)


def _compare_datasets(reader: LaneReader, num_samples: int, world: World) -> None:
    """Raise where ranks see other datasets, which would otherwise show as a hang or a wrong model."""
    own = fingerprint(reader, num_samples)
    for rank, other in enumerate(world.all_gather_object(own)):
        if other != own:
            raise DataError(
                f"ranks {world.rank} and {rank} see different datasets: {own.num_samples} and "
                f"{other.num_samples} samples, digests of three samples {own.samples_digest} and "
                f"{other.samples_digest}. A dataset must be whole on every rank."
            )


def _last_step(config: RunConfig, schedule: Schedule) -> int:
    """Return the step before which training ends: the earlier one of epochs and max_steps."""
    limits = [] if config.train.max_steps is None else [config.train.max_steps]
    if config.train.epochs is not None:
        limits.append(config.train.epochs * schedule.steps_per_epoch)
    return min(limits)


def _describe(config: RunConfig, schedule: Schedule, world: World, last_step: int) -> None:
    """Say what was derived from the configuration, before the first step."""
    blocks = lane_blocks(schedule.num_lanes, world.world_size)
    lanes_each = sorted({len(block) for block in blocks})
    accumulation = " or ".join(map(str, lanes_each))
    logger.info(
        "%d samples in steps of %d = %d lanes x %d: %d steps an epoch, %d steps in all\n"
        "%d %s on %s, reducer %s (%s): %s lanes each, so gradient accumulation x%s; threads each: %d",
        schedule.num_samples,
        schedule.global_batch_size,
        schedule.num_lanes,
        schedule.micro_batch_size,
        schedule.steps_per_epoch,
        last_step,
        world.world_size,
        "process" if world.world_size == 1 else "processes",
        world.device.type,
        config.distributed.reducer if world.world_size > 1 else "single",
        config.distributed.equality,
        accumulation,
        accumulation,
        config.distributed.threads,
    )
