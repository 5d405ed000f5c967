"""Builds the parts of a run from a configuration and the user's Task, the model first."""

import copy
import logging
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from lanewise.config import RunConfig
from lanewise.config.check import nearest
from lanewise.config.class_path import resolve_class
from lanewise.config.classes import build
from lanewise.data import LaneSource
from lanewise.data.collate import collate
from lanewise.data.source import with_reader
from lanewise.engine.evaluation.evaluation import Evaluation, build_evaluator
from lanewise.engine.precision import Precision
from lanewise.engine.run.optimizer import build_optimizer, refuse_draws
from lanewise.engine.run.run import Run
from lanewise.engine.run.scheduler import build_scheduler, steps_per_value
from lanewise.engine.samples.dataset import OrderChoice, Tables, require_apart
from lanewise.engine.samples.source import build_source
from lanewise.engine.state.init_from import init_model
from lanewise.engine.state.optimizer_shards import OptimizerShards
from lanewise.engine.state.resume_check import identify, plain
from lanewise.engine.state.run_state import RunState
from lanewise.engine.step.average import build_average
from lanewise.engine.step.lane_error import explain_memory
from lanewise.engine.step.lanes import LaneRunner
from lanewise.engine.step.metrics import LogInterval
from lanewise.engine.step.own_update import OwnUpdate, own_updates
from lanewise.engine.step.phases import Phases
from lanewise.engine.step.update import Training
from lanewise.engine.transforms import checkpoint_activations, compile_forwards, synchronise_batch_norm
from lanewise.errors import ConfigError, TaskError
from lanewise.lanes import Placement, RunLength, model_seed
from lanewise.processes.device.random_state import set_random_state
from lanewise.processes.world.shards import is_sharded
from lanewise.processes.world.world import World
from lanewise.reduce import build_reducer, require_plain
from lanewise.runs.callback import Callback
from lanewise.task import Task

logger = logging.getLogger(__name__)


_NEAR = 0.8
"""So much of two names must be alike that one may be meant by the other."""


def build_task(config: RunConfig, task: Task | None = None) -> Task:
    """Build the user's task, under the same random state as the model; of one that was given, a copy.

    Raises:
        ConfigError: if the class is not a Task.
    """
    if task is not None:
        return copy.deepcopy(task)
    resolve_class("task", config.task)  # before seeding: a module may seed a generator when it is imported
    set_random_state(model_seed(config.train.seed))
    built: Task = build("task", config.task)
    return built


def warn_of_misspelt(task: Task) -> None:
    """Warn of methods of a task that nobody calls, since they are named nearly as a method of `Task` is.

    One that the class has besides the method itself is its own affair.
    """
    cls = type(task)
    known = [name for name in dir(Task) if not name.startswith("_")]
    own = {name for name in known if getattr(cls, name) is not getattr(Task, name)}
    for name in (name for name in dir(cls) if not name.startswith("_") and name not in known):
        near = nearest(name, known, cutoff=_NEAR) if callable(getattr(cls, name)) else None
        if near and near not in own:
            logger.warning("%s.%s is not used: did you mean %s?", cls.__name__, name, near)


def build_model(task: Task, seed: int) -> nn.Module:
    """Build the task's model on the CPU, with the same weights on every rank.

    Raises:
        TaskError: if the task returns something else, or a model that is distributed already.
    """
    set_random_state(model_seed(seed))  # so that the weights don't depend on what the task's constructor drew
    model: object = task.build_model()
    if not isinstance(model, nn.Module):
        raise TaskError(
            f"{type(task).__name__}.build_model must return a torch.nn.Module: got {model!r:.60}. "
            "Return the model."
        )
    require_plain(model)  # a copy of it, for an average, would fail with an error of torch
    if compiled := next((name for name, _ in model.named_parameters() if "_orig_mod." in name), ""):
        raise TaskError(
            f"{type(task).__name__}.build_model compiled a module, whose weights every file would then have "
            f"as {compiled}. Return the plain one and set compile, or call its compile(), which keeps names."
        )
    return model


def transform(model: nn.Module, config: RunConfig, device: torch.device) -> nn.Module:
    """Apply the transforms that a run asks for to a model. Each keeps the names of parameters and buffers.

    Args:
        model: the task's model, on the CPU; equal on all ranks.
        config: the run, which tells whether and how to change the model.
        device: the device to which the model will be moved.

    Raises:
        ConfigError: if a configured transform does not work for this model or on this device.
        TaskError: if the model does not meet the conditions of a transform.
    """
    names = _names(model)
    if config.distributed.sync_batch_norm:
        model = synchronise_batch_norm(model)
    if config.compile is not None:
        model = compile_forwards(model, config.compile)
    # After compile: a compiled block is checkpointed, so the backward runs the compiled block again.
    if (section := config.memory.activation_checkpointing) is not None:
        if section.offload and device.type == "cpu":
            raise ConfigError(
                "memory.activation_checkpointing.offload needs an accelerator: got true on the CPU, where "
                "everything is in host memory. Leave it out."
            )
        model = checkpoint_activations(model, section.blocks, offload=section.offload)
    assert _names(model) == names, "a transform renamed parameters or buffers"
    return model


def _names(model: nn.Module) -> list[str]:
    return [name for name, _ in (*model.named_parameters(), *model.named_buffers())]


def build_run(config: RunConfig, world: World, task: Task | None = None, *, is_restored: bool = False) -> Run:
    """Build all parts of a run on this process.

    Collective: every rank must call this, with the same configuration.

    Args:
        config: the configuration of the run.
        world: the processes.
        task: used instead of the one that the configuration names.
        is_restored: whether a checkpoint is restored into it next, so that `train.init_from` is not read.

    Raises:
        CheckpointError: if the weights of `train.init_from` are not there, or do not fit.
        ConfigError: if a class in the configuration is not of the type that its section needs.
        DataError: if the dataset is empty, differs between ranks, or has samples of an eval dataset.
        TaskError: if the model has nothing to train, or no room on the device, or a stream is read for two
            datasets and cannot be.
        WorldError: if the ranks built different models.
    """
    if world.rank == 0:
        logger.info("building the model and reading the datasets")
    placement = Placement.of(config.batch.num_lanes, world)
    precision = Precision(config.precision, world.device.type)
    lanes = LaneRunner(task or build_task(config), precision, config.train.seed)
    if world.rank == 0:
        warn_of_misspelt(lanes.task)
    model = build_model(lanes.task, lanes.seed)
    if config.train.init_from is not None and not is_restored:
        init_model(model, config.train.init_from, world.rank)
    model = transform(model, config, world.device)
    average = build_average(model, config.train.ema_decay)
    phases = Phases(world.device)
    try:
        reducer = build_reducer(model, placement, world, config.distributed, on_bucket=phases.begin_sending)
    except Exception as error:
        explain_memory(error, "the weights", "Share them out: distributed.reducer=fsdp, on more devices.")
        raise
    if average is not None:
        reducer.adopt(average.module)
    optimizer = build_optimizer(config, lanes.task, model)
    shards = None
    if config.distributed.shard_optimizer and world.world_size > 1:
        shards = OptimizerShards(optimizer, model, world)
    if shards is not None or any(map(is_sharded, model.parameters())):
        refuse_draws(optimizer)
    loader = build_run_loader(config, lanes.task, world, placement)
    last_step = last_step_of(config, loader)
    evaluated = average.module if average else model
    evaluator = build_evaluator(config, lanes, evaluated, world, placement, reducer)
    evaluation: Evaluation | None = None
    if evaluator is not None:
        require_apart(loader.reader, [eval_set.reader for eval_set in evaluator.sets])
        evaluation = Evaluation(config.evaluate, evaluator)
        config = replace(config, evaluate=evaluation.config)
    each = steps_per_value(config, loader.schedule)
    scheduler, plateau = build_scheduler(config, optimizer, last_step and -(-last_step // each))
    own = {name: OwnUpdate(lanes, model, world, name) for name in own_updates(lanes.task)}
    before, after, norm = own.get("before_update"), own.get("after_update"), config.train.max_grad_norm
    training = Training(
        model, optimizer, scheduler, before, after, average, config.optimizer.closure, norm, each
    )
    samples_of = None if lanes.loss_method == "batch_loss" else loader.samples_of
    log_interval = LogInterval(config.log.every_steps, last_step, lambda: loader.is_over, samples_of)
    state = RunState(
        {
            "model": model,
            "optimizer": optimizer,
            "scheduler": scheduler,
            "plateau": None if plateau is None else plateau.scheduler,
            "loss_scale": lanes.precision.loss_scale,
            "average": average,
            "best": evaluation,
            "log": log_interval,
            "stream": loader.state,
        },
        may_lack=("log",),
        shards=shards,
    )
    run = Run(
        config=config,
        world=world,
        placement=placement,
        runner=lanes,
        training=training,
        plateau=plateau,
        shards=shards,
        reducer=reducer,
        phases=phases,
        loader=loader,
        evaluation=evaluation,
        log_interval=log_interval,
        last_step=last_step,
        identity=identify(config, loader.identity, world, last_step),
        state=state,
    )
    if world.rank == 0:
        run.describe()
    return run


def build_callbacks(config: RunConfig) -> list[Callback]:
    """Build the user's callbacks.

    Raises:
        ConfigError: if a class is not a Callback.
    """
    return [build(f"callbacks.{number}", section) for number, section in enumerate(config.callbacks)]


def build_run_loader(config: RunConfig, task: Task, world: World, placement: Placement) -> LaneSource:
    """Build the loader of a run's training dataset on this process; see `build_source`.

    Collective: every rank must call this, with the same configuration.

    Args:
        config: the run.
        task: the user's task.
        world: the processes.
        placement: which process carries which lanes.
    """
    dataset = task.train_dataset()
    source = build_source(
        dataset,
        collate if getattr(task.collate, "__func__", None) is Task.collate else task.collate,
        config.train.seed,
        config.batch,
        config.data,
        world,
        placement,
        order=choose_order(config),
        tables=order_tables(task, dataset),
        num_epochs=config.train.epochs,
        fills_empty=config.distributed.kind.shards_weights or task.loss_method() == "batch_loss",
    )
    return with_reader(source, length=RunLength(last_step_of(config, source)))


def choose_order(config: RunConfig) -> OrderChoice | None:
    """Choose the order of the training samples; None where the configuration leaves it to the dataset."""
    section = config.data.order_class
    return None if section is None else OrderChoice(partial(build, "data.order", section), plain(section))


def order_tables(task: Task, dataset: Any) -> Tables:
    """Return functions by name that return the tables which an order may need."""
    return {
        "sample_lengths": lambda: task.sample_lengths(dataset),
        "sample_weights": lambda: task.sample_weights(dataset),
    }


def last_step_of(config: RunConfig, loader: LaneSource) -> int | None:
    """Return the step before which training ends: the earlier end of `epochs` and `max_steps`.

    None where that is the end of a stream's epochs, which nobody knows.
    """
    limits = [] if config.train.max_steps is None else [config.train.max_steps]
    if config.train.epochs is not None and loader.schedule is not None:
        limits.append(config.train.epochs * loader.schedule.steps_per_epoch)
    return min(limits, default=None)
