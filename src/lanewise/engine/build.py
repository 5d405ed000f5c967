"""Builds an engine from a configuration and the user's Task."""

import logging
from collections.abc import Callable, Sized
from typing import Any

from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from lanewise.callback import Callback
from lanewise.config import BatchConfig, DataConfig, RunConfig
from lanewise.config.class_path import resolve_class
from lanewise.config.classes import build
from lanewise.data import Fingerprint, LaneLoader, LaneReader, fingerprint
from lanewise.engine.clock import StepClock
from lanewise.engine.engine import Engine
from lanewise.engine.evaluate import EvalSet, Evaluation, Evaluator
from lanewise.engine.identity import identify
from lanewise.engine.optimizer import build_optimizer, require_enough_steps
from lanewise.engine.passes import LanePasses
from lanewise.engine.step import Training, TrainStep
from lanewise.errors import ConfigError, DataError, TaskError
from lanewise.lanes import BlockSchedule, Order, Schedule, lane_blocks, model_seed
from lanewise.precision import Precision
from lanewise.random_state import set_random_state
from lanewise.reduce import Reducer, build_reducer
from lanewise.task import Task
from lanewise.world.accelerator import has_streams
from lanewise.world.world import World

logger = logging.getLogger(__name__)

Collate = Callable[[list[Any]], Any]


def build_task(config: RunConfig) -> Task:
    """Build the user's task, under the random state that the model will be built under.

    Raises:
        ConfigError: if the class is not a Task.
    """
    resolve_class("task", config.task)  # before seeding: a module may seed a generator when it is imported
    set_random_state(model_seed(config.train.seed))
    task: Task = build("task", config.task)
    return task


def build_model(task: Task, seed: int) -> nn.Module:
    """Build the task's model on the CPU, with the same weights on every rank.

    Raises:
        TaskError: if the task returns something else.
    """
    set_random_state(model_seed(seed))  # so that the weights don't depend on what the task's constructor drew
    model: object = task.build_model()
    if not isinstance(model, nn.Module):
        raise TaskError(
            f"{type(task).__name__}.build_model must return a torch.nn.Module: got {model!r:.60}. "
            "Return the model."
        )
    return model


def build_engine(config: RunConfig, world: World, task: Task | None = None) -> Engine:
    """Build everything that a run needs on this process.

    Collective: every rank must call this, with the same configuration.

    Args:
        config: what to run.
        world: the processes.
        task: used instead of the one that the configuration names.

    Raises:
        ConfigError: if a class in the configuration is not what its section needs.
        DataError: if the dataset is empty, or differs between ranks.
        TaskError: if the model has nothing to train.
        WorldError: if the ranks built different models.
    """
    task = task or build_task(config)
    model = build_model(task, config.train.seed)
    ema_decay = config.train.ema_decay
    # Copied before anything is hooked to the model.
    average = None
    if ema_decay is not None:
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(ema_decay))
    clock = StepClock(world.device)
    reducer = build_reducer(
        model,
        config.batch.num_lanes,
        world,
        config.distributed,
        on_bucket=lambda: clock.lap("backward"),
    )
    if average is not None:
        reducer.adopt(average.module)
    optimizer, scheduler = build_optimizer(config, task, model)
    precision = Precision(config.precision, world.device.type)
    training = Training(task, model, optimizer, scheduler, precision, average)

    loader, found = build_loader(
        task.train_dataset(),
        task.collate,
        config.batch,
        config.data,
        world,
        config.train.seed,
        is_collective=reducer.forward_is_collective,
    )
    schedule = loader.schedule
    passes = LanePasses(
        reducer,
        world,
        clock,
        num_lanes=schedule.num_lanes,
        seed=config.train.seed,
        loss_scale=precision.loss_scale,
        modules=[[replica] for replica in reducer.replicas],
        is_exact=config.distributed.equality == "exact",
    )
    train_step = TrainStep(training, passes, clock, max_grad_norm=config.train.max_grad_norm)
    last_step = _last_step(config, schedule)
    require_enough_steps(config, scheduler, last_step)
    evaluator = build_evaluator(config, task, training.evaluated_model, precision, world, reducer)
    evaluation = None
    if evaluator is not None:
        every_steps = config.evaluate.every_steps or config.evaluate.every_epochs * schedule.steps_per_epoch
        evaluation = Evaluation(
            evaluator, every_steps, last_step, config.evaluate.best, config.evaluate.best_mode
        )
    if world.rank == 0:
        _describe(config, schedule, world, len(reducer.replicas), last_step)
    engine = Engine(training, train_step, passes, loader, schedule, world, last_step, evaluation)
    engine.identity = identify(config, found, world)
    return engine


def build_callbacks(config: RunConfig) -> list[Callback]:
    """Build the user's callbacks.

    Raises:
        ConfigError: if a class is not a Callback.
    """
    return [build(f"callbacks.{number}", section) for number, section in enumerate(config.callbacks)]


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


def build_loader(
    dataset: Any,
    collate: Collate,
    batch: BatchConfig,
    data: DataConfig,
    world: World,
    seed: int,
    *,
    is_collective: bool = False,
) -> tuple[LaneLoader, Fingerprint]:
    """Build what feeds the lanes of this process. Collective: every rank must call this.

    Args:
        dataset: map-style; equal on every rank.
        collate: makes a micro-batch of samples.
        batch: sizes.
        data: order and loading.
        world: the processes.
        seed: seed of the run.
        is_collective: whether a forward is, so that every process needs equally many batches.

    Returns:
        The loader, and what its dataset is known by.

    Raises:
        DataError: if not one step can be made of the dataset, or it differs between ranks.
        TaskError: if it is not map-style.
    """
    num_samples = count_samples(dataset)
    schedule = Schedule(num_samples, batch.global_batch_size, batch.micro_batch_size, data.drop_last)
    if not schedule.steps_per_epoch:
        raise DataError(
            f"no step can be made of the training dataset: it has {num_samples} samples, a step takes "
            f"{batch.global_batch_size}" + (" and drop_last is set." if num_samples else ". Check its path.")
        )
    reader = LaneReader(dataset, collate, seed)
    blocks = lane_blocks(schedule.num_lanes, world.world_size)
    loader = LaneLoader(
        reader,
        schedule,
        Order(num_samples, seed=seed, shuffle=data.shuffle),
        blocks[world.rank],
        as_many_as=blocks[0] if is_collective else None,
        num_workers=data.num_workers,
        pin_memory=has_streams(world.device),
    )
    return loader, compare_datasets(reader, num_samples, world)


def count_samples(dataset: Any) -> int:
    """Return the length of a map-style dataset, or raise TaskError where it is none."""
    if not isinstance(dataset, Sized) or not hasattr(dataset, "__getitem__"):
        raise TaskError(
            f"a dataset of the task must be map-style: got {type(dataset).__name__}. "
            "Lanes read samples by index, so it needs __len__ and __getitem__."
        )
    return len(dataset)


def compare_datasets(reader: LaneReader, num_samples: int, world: World) -> Fingerprint:
    """Return what a dataset is known by; raise where ranks see other ones.

    A difference would otherwise show as a hang or a wrong model. Collective: every rank must call this.
    """
    own = fingerprint(reader, num_samples)
    for rank, other in enumerate(world.all_gather_object(own)):
        if other != own:
            raise DataError(
                f"ranks {world.rank} and {rank} see different datasets: {own.num_samples} and "
                f"{other.num_samples} samples, digests of three samples {own.samples_digest} and "
                f"{other.samples_digest}. A dataset must be whole on every rank."
            )
    return own


def _last_step(config: RunConfig, schedule: Schedule) -> int:
    """Return the step before which training ends: the earlier one of epochs and max_steps."""
    limits = [] if config.train.max_steps is None else [config.train.max_steps]
    if config.train.epochs is not None:
        limits.append(config.train.epochs * schedule.steps_per_epoch)
    return min(limits)


def _describe(config: RunConfig, schedule: Schedule, world: World, num_replicas: int, last_step: int) -> None:
    """Say what was derived from the configuration, before the first step."""
    num_devices = world.world_size * num_replicas
    lanes_each = sorted({len(block) for block in lane_blocks(schedule.num_lanes, num_devices)})
    accumulation = " or ".join(map(str, lanes_each))
    processes = "1 process" if world.world_size == 1 else f"{world.world_size} processes"
    logger.info(
        "%d samples in steps of %d = %d lanes x %d: %d steps an epoch, %d steps in all\n"
        "%s on %s, reducer %s (%s): %s lanes each, so gradient accumulation x%s; threads each: %d",
        schedule.num_samples,
        schedule.global_batch_size,
        schedule.num_lanes,
        schedule.micro_batch_size,
        schedule.steps_per_epoch,
        last_step,
        processes if num_replicas == 1 else f"{num_replicas} devices in {processes}",
        world.device.type,
        config.distributed.reducer if num_devices > 1 else "single",
        config.distributed.equality,
        accumulation,
        accumulation,
        config.distributed.threads,
    )
