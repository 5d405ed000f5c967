"""The engine for users who keep their own loop: lanes, their gradients, evaluation and checkpoints."""

import atexit
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import numpy as np
from torch import nn
from torch.utils.data import Dataset

from lanewise.config import (
    Backend,
    BatchConfig,
    CompressionName,
    DataConfig,
    DistributedConfig,
    Equality,
    InitFromConfig,
    MissingName,
    PrecisionName,
    pin_environment,
)
from lanewise.data.audit import AuditLog
from lanewise.data.collate import collate as default_collate
from lanewise.data.lane_stream import Stream
from lanewise.data.source import with_reader
from lanewise.engine.buffers.buffers import LaneBuffers
from lanewise.engine.buffers.pack import find_places
from lanewise.engine.own_loop.average import Average
from lanewise.engine.own_loop.checkpoints import OwnCheckpoints
from lanewise.engine.own_loop.datasets import OwnDatasets
from lanewise.engine.own_loop.evaluation import evaluated
from lanewise.engine.own_loop.join import close_at_exit, join
from lanewise.engine.own_loop.steps import Prepared, Steps
from lanewise.engine.precision import LossScale, Precision
from lanewise.engine.samples.dataset import Collate, OrderChoice
from lanewise.engine.samples.source import build_source
from lanewise.engine.state.init_from import init_model
from lanewise.engine.state.left_out import digests_left_out
from lanewise.engine.state.resume_check import identify_exact
from lanewise.engine.step.average import build_average
from lanewise.engine.step.build import build_pass
from lanewise.engine.step.phases import Phases
from lanewise.engine.step.wire import Spread
from lanewise.errors import TaskError, raised_at_call
from lanewise.lanes import OrderInputs, Placement, SampleOrder, model_seed
from lanewise.processes.device.determinism import set_determinism
from lanewise.processes.device.random_state import set_random_state
from lanewise.processes.world.environment import Environment
from lanewise.reduce import build_reducer
from lanewise.runs.checkpoint.model_file import save_model
from lanewise.runs.dir import RunDir
from lanewise.runs.file import writing

if TYPE_CHECKING:
    from torchmetrics import Metric


@final
class Lanes:
    """The lanes of a run, for your own training loop.

        lanes = Lanes(global_batch_size=64, micro_batch_size=16)
        model = lanes.prepare(build_model())
        steps = lanes.steps(dataset)
        for epoch in range(3):
            for step in steps:
                for images, labels in step:
                    step.backward(loss_function(model(images), labels))
                optimizer.step()

    It joins the processes that torchrun, Slurm or MPI started, or runs as a single process. It also seeds the
    default random generators, so make it before any computation, and build the models afterwards. Every
    method but `autocast` and `print` is collective: every rank must call it.

    Args:
        global_batch_size: number of samples in one optimizer step, over all lanes.
        micro_batch_size: number of samples in one lane's forward.
        seed: seed of the weights, the sample order and every lane's random numbers.
        equality: `close`, or `exact`: the same bytes on any number of processes.
        precision: the format in `autocast`: `float32`, `tf32`, `bf16` or `fp16`.
        device_type: `auto`, `cpu`, or the type of accelerator that torch finds, such as `cuda` or `mps`.
        backend: `auto`, `gloo` or `nccl`.
        threads: intra-op CPU threads of each process.
        stall_seconds: after how many seconds without progress within the steps several processes end, with a
            report of who waits for whom; None: never. What runs between the steps may take any time.

    Raises:
        ConfigError: lists the errors in the arguments.
        WorldError: if the environment describes a world only partly.
    """

    @raised_at_call
    def __init__(  # noqa: PLR0913 - a configuration, as arguments
        self,
        *,
        global_batch_size: int,
        micro_batch_size: int,
        seed: int = 0,
        equality: Equality = "close",
        precision: PrecisionName = "float32",
        device_type: str = "auto",
        backend: Backend = "auto",
        threads: int = 1,
        stall_seconds: float | None = 300.0,
    ) -> None:
        self._batch = BatchConfig(global_batch_size=global_batch_size, micro_batch_size=micro_batch_size)
        distributed = DistributedConfig(
            equality=equality,
            device_type=device_type,
            backend=backend,
            threads=threads,
            stall_seconds=stall_seconds,
        )
        pin_environment(threads, equality)
        set_determinism(equality, threads)
        environment = Environment.from_env(os.environ) or Environment()
        self._placement = Placement.of(self._batch.num_lanes, environment)  # raises before anybody waits
        self._world, self._watch = join(environment, distributed)
        self._at_exit = close_at_exit(self.close)
        self.rank, self.world_size = self._world.rank, self._world.world_size
        self.device = self._world.device
        self._seed, self._distributed = seed, distributed
        self._precision = Precision(precision, self.device.type)
        self._prepared = Prepared(seed, Spread(self._world, self._placement, equality), Phases(self.device))
        self._precision_name = precision
        self._datasets = OwnDatasets()
        self._averages: dict[nn.Module, Average] = {}
        self._is_closed = False
        set_random_state(model_seed(seed))

    def prepare(
        self,
        model: nn.Module,
        *,
        compression: CompressionName | None = None,
        step_state: Sequence[str] = (),
        init_from: str | InitFromConfig | None = None,
        ema_decay: float | None = None,
    ) -> nn.Module:
        """Move a model to this process's device, and prepare the reduction of its gradients.

        The returned model is the user's own module, without a wrapper.

        Args:
            model: a module that is equal on every rank.
            compression: how its gradients travel in `close`: `bf16` or `fp16`; None: they are not compressed.
            step_state: names of buffers, or of modules with all buffers below, that no lane writes: they are
                not merged. The loop writes them once in a step, after `optimizer.step()` (docs/losses.md).
            init_from: the weights to begin with: a file, the folder of a run, or what `train.init_from` says.
                A checkpoint that is restored later wins.
            ema_decay: decay of the average of its weights that `average` returns; None: there is none.

        Raises:
            CheckpointError: if the weights of `init_from` are not there, or do not fit.
            ConfigError: if the grade rules the compression out, or the decay is out of range.
            TaskError: if it was prepared before, has no trainable parameter, or one that does not compress.
            WorldError: if the ranks built different models.
        """
        if model in self._prepared.passes:
            raise TaskError("this model was prepared before. Call lanes.prepare(model) once.")
        if init_from is not None:
            init_model(model, init_from, self.rank)
        self._prepared.step_state[0].extend(find_places(model, step_state))
        average = build_average(model, ema_decay)
        distributed = replace(self._distributed, compression=compression)
        reducer = build_reducer(model, self._placement, self._world, distributed)
        self._prepared.passes[model] = build_pass(
            reducer,
            self._prepared.spread,
            self._prepared.phases,
            LaneBuffers([self._prepared.passes], self._world, self._placement, self._prepared.step_state),
            loss_scale=None if self._precision.loss_scale is None else LossScale(),
        )
        self._prepared.trained[model] = set(map(id, reducer.parameters))
        self._prepared.digests[model] = digests_left_out(model)
        if average is not None:
            reducer.adopt(average.module)
            self._averages[model] = Average(average, model)
        return model

    def average(self, model: nn.Module) -> Average:
        """Return the average of a model that was prepared with `ema_decay`; else raise TaskError."""
        if model not in self._averages:
            raise TaskError("this model has no average. Call lanes.prepare(model, ema_decay=0.999).")
        return self._averages[model]

    def steps(  # noqa: PLR0913 - the section data, as arguments
        self,
        dataset: Dataset[Any],
        *,
        collate: Collate = default_collate,
        num_workers: int = 0,
        pin_memory: bool = True,
        order: str | Callable[[OrderInputs], SampleOrder] | None = None,
        sample_lengths: Any = None,
        sample_weights: Any = None,
        shuffle_buffer: int = 0,
        missing: MissingName = "error",
        drop_last: bool = False,
        first_step: int = 0,
        data_changes: bool = False,
        audit: str | Path | None = None,
    ) -> Steps:
        """Cut a dataset into steps; each process reads its own lanes only.

        The samples of each call are read under random numbers of their own.

        Args:
            dataset: a map-style dataset or a stream, the same on every rank.
            collate: makes a micro-batch of samples.
            num_workers: number of processes that read ahead.
            pin_memory: whether batches for an accelerator wait in page-locked host memory.
            order: the order in which an epoch visits the samples: a name as in `data.order`, a `SampleOrder`
                class, or a class with further arguments: `functools.partial(BucketedOrder, max_tokens=4096)`.
                None: blocked for a dataset in blocks, else shuffled.
            sample_lengths: the number of tokens of each sample, for the order bucketed.
            sample_weights: the weight of each sample, for the order weighted.
            shuffle_buffer: how many samples of each lane of a stream are held at once and shuffled.
            missing: what a sample is for which the dataset returns None: an error, or left out (`skip`).
            drop_last: whether to drop the partial last step of an epoch; of a stream, what some lane lacks.
            first_step: the step with which to begin, also in the middle of an epoch; earlier ones are not
                read. A stream begins with 0, or with that of the checkpoint that was restored.
            data_changes: whether the loop makes or weights the samples anew, as reinforcement learning does:
                then the run may go on with others, if their number and order are the same.
            audit: the folder of the run, on a file system that all ranks share, where to write what each lane
                is given, for `lanewise audit`; None: nowhere. One dataset of a run can be audited.

        Raises:
            ConfigError: if there is no such order, its arguments are out of range, or it is of a stream.
            DataError: if the dataset is too small, differs between ranks, or lacks a table of the order.
            CheckpointError: if `checkpoints` restored a run of another dataset.
        """
        given = {"sample_lengths": sample_lengths, "sample_weights": sample_weights}
        tables = {name: partial(np.asarray, table) for name, table in given.items() if table is not None}
        reading: dict[str, Any] = {"num_workers": num_workers, "pin_memory": pin_memory}
        reading["shuffle_buffer"] = shuffle_buffer
        loader = build_source(
            *(dataset, collate, self._seed, self._batch),
            DataConfig(**reading, missing=missing, drop_last=drop_last),
            self._world,
            self._placement,
            order=None if order is None else OrderChoice.of(order),
            tables=tables,
            fills_empty=True,  # for `Step.batch_loss`
        )
        number = self._datasets.begin(loader.identity, first_step, data_changes=data_changes)
        loader = with_reader(loader, number=number)
        if loader.state is not None:
            self._datasets.add_stream(loader.state)
        batches = loader.batches(first_step, None)
        if audit is not None:
            plan, of_order = loader.plan()
            place = RunDir(Path(audit)).audit, self.rank, self.world_size, first_step
            log = AuditLog(*place, {**plan, "seed": self._seed}, of_order)
            batches = recorded = log.record(batches)
            atexit.register(recorded.close)  # before Python's end, where its file could not be closed
        return Steps(loader, self._prepared, first_step, batches)

    def evaluate(
        self,
        dataset: Dataset[Any] | Stream,
        *metrics: "Metric",
        collate: Collate = default_collate,
        num_workers: int = 0,
        missing: MissingName = "error",
    ) -> Iterator[Any]:
        """Yield the micro-batches of this process's share of a dataset or a stream, each sample exactly once.

            for images, labels in lanes.evaluate(dataset, accuracy):
                accuracy.update(model(images), labels)

        When the iterator ends, the metrics on every rank hold the states of all lanes, merged in lane order:
        `compute` returns the same value on any number of processes. Before, they hold those of the lane whose
        micro-batch was yielded. Put the model into evaluation mode first. Afterwards the buffers of prepared
        models, and the random state, are as they were before.

        Raises:
            DataError: if the dataset is empty, or differs between ranks.
            TaskError: if a metric cannot be merged.
        """
        size, parts = self._batch.micro_batch_size, (self._prepared, self._world, num_workers)
        return evaluated(dataset, metrics, *parts, collate=collate, missing=missing, samples_per_lane=size)

    def checkpoints(
        self, folder: str | Path, *, keep_last: int = 2, before_step: int | None = None, **objects: Any
    ) -> OwnCheckpoints:
        """Restore objects from the newest good checkpoint in a folder, if there is one, and save them there.

            checkpoints = lanes.checkpoints("runs/mine", model=model, optimizer=optimizer)
            steps = lanes.steps(dataset, first_step=checkpoints.step)
            ...
            checkpoints.save(step.number + 1)

        Call it when all models are prepared. A run may resume with another number of processes.

        Args:
            folder: on a file system that all ranks share; RunDirError if another process saves to it.
            keep_last: how many of the newest checkpoints to keep.
            before_step: index of a step to replay; no later checkpoint is restored, and nothing is saved.
            objects: modules, optimizers, and other objects with `state_dict` and `load_state_dict`. Their
                state must be the same on every rank, which `save` compares.

        Raises:
            CheckpointError: if an object cannot be saved, the checkpoint does not fit, or none is good.
        """
        identity = {
            "lanes": asdict(self._batch),
            "seed": self._seed,
            "precision": self._precision_name,
            "exact": identify_exact(self._distributed, self._world),
        }
        parts = Path(folder), self._world, identity, objects, self._prepared, self._datasets
        return OwnCheckpoints(*parts, keep_last=keep_last, before_step=before_step)

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context in which a micro-batch's forward and loss run in the run's precision."""
        return self._precision.forward()

    def save_model(self, model: nn.Module, path: str | Path) -> None:
        """Write a model's weights as safetensors, on rank 0, under the names of the plain module.

        A missing folder is made. Other ranks find the file after the next collective call, as an evaluation.
        """
        path = Path(path)
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        save_model(model, path, self.rank)

    def print(self, *values: object) -> None:
        """Print on rank 0."""
        if self.rank == 0:
            print(*values, flush=True)  # noqa: T201 - what the user asks for

    def close(self) -> None:
        """Wait for the last save, raise the error of the last step, leave the world. Called at exit, too."""
        if self._is_closed:
            return
        self._is_closed = True
        atexit.unregister(self._at_exit)
        self._prepared.close()
        for pass_ in self._prepared.passes.values():
            pass_.buffers.check()
        self._prepared.passes.clear()
        self._watch.close(self._world.close)
