"""Reads and computes single micro-batches of a newly built run, for the probes."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any, final

import torch
from torch import nn
from torch.utils.data import Dataset

from lanewise.config import BatchConfig, MissingName, OrderConfig, RunConfig
from lanewise.data import LaneBatch, LaneReader, Rows, StreamCut, StreamReader, digest, is_stream
from lanewise.engine.buffers.pack import kept_buffers
from lanewise.engine.evaluation.eval_set import IndexedSet
from lanewise.engine.evaluation.evaluator import Evaluator
from lanewise.engine.precision import Precision
from lanewise.engine.run.build import build_model, build_task, choose_order, last_step_of, order_tables
from lanewise.engine.samples.dataset import build_loader, count_samples, eval_datasets_of
from lanewise.engine.step.lanes import LaneRunner, TaskLane
from lanewise.engine.step.terms import LaneLoss
from lanewise.lanes import PROGRESS, LaneTurn, Placement, RunLength, SequentialSchedule
from lanewise.processes.device.accelerator import move
from lanewise.processes.device.random_state import set_random_state
from lanewise.processes.world.world import LocalWorld, World
from lanewise.reduce import Reducer
from lanewise.task import Task

_NOISE = 0.1


@final
class FirstSamples(Dataset[Any]):
    """The samples of the first steps of a stream, lane after lane, in memory; each read gives a copy.

    Args:
        stream: read on its own, by this process alone.
        seed: seed of the run.
        batch: how a step is cut into lanes.
        num_steps: how many steps to take.
        missing: what is done with samples that the stream yields as None.
        eval_dataset: the stream's name if it is evaluated.
    """

    def __init__(
        self,
        stream: Any,
        seed: int,
        batch: BatchConfig,
        num_steps: int = 1,
        *,
        missing: MissingName,
        eval_dataset: str = "",
    ) -> None:
        lanes = range(batch.num_lanes)
        cut = StreamCut.of(batch.num_lanes, batch.micro_batch_size, 0)
        reader = StreamReader(stream, list, seed, cut, lanes, eval_dataset=eval_dataset, missing=missing)
        steps = [[reader[0, lane].data or [] for lane in lanes] for _ in range(num_steps)]
        self._samples: list[Any] = [sample for step in steps for samples in step for sample in samples]
        self._lanes = [[step[lane] for step in steps] for lane in lanes] if reader.is_lane_aware else []

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        """Return a sample; an empty text where there are fewer."""
        return copy.deepcopy(self._samples[index]) if index < len(self) else ""

    def equal_lanes(self) -> Sequence[int]:
        """Return two lanes of a lane-aware stream that have the same samples; none where all differ.

        A lane whose samples are all equal tells nothing.
        """
        first: dict[str, int] = {}
        for lane, steps in enumerate(self._lanes):
            if len({digest(sample) for samples in steps for sample in samples}) > 1:
                other = first.setdefault(digest(steps), lane)
                if other != lane:
                    return [other, lane]
        return []


def readable(dataset: Any, seed: int, batch: BatchConfig, missing: MissingName, eval_dataset: str) -> Any:
    """Return a dataset to evaluate; of a stream its first samples, as many as a global batch has."""
    if is_stream(dataset):
        return FirstSamples(dataset, seed, batch, missing=missing, eval_dataset=eval_dataset)
    return dataset


@final
class ProbedRun:
    """A newly built task with its model and data, of which single micro-batches can be read and computed.

    Of a stream it has the samples of the first two steps, in their order.

    Args:
        config: the run.
        device: where to compute.
        task: what the user gave as an object; None: the configuration names it.
        data_of: another one, whose datasets it takes instead of reading them again.
    """

    def __init__(
        self,
        config: RunConfig,
        device: torch.device,
        task: Task | None = None,
        *,
        data_of: "ProbedRun | None" = None,
    ) -> None:
        self.seed = config.train.seed
        self.device = device
        self.given_task = task
        self.task: Task = build_task(config, task)
        self.model: nn.Module = build_model(self.task, self.seed).to(device)
        self.dataset: Dataset[Any] = self.task.train_dataset() if data_of is None else data_of.dataset
        self._batch, self._missing = config.batch, config.data.missing
        self._data_of = data_of
        self.of_stream: FirstSamples | None = self._first_samples() if data_of is None else data_of.of_stream
        """The samples of a stream; None where the dataset has an index."""
        if self.of_stream is not None:
            data = replace(config.data, order=OrderConfig(class_path="sequential"))
            config = replace(config, data=replace(data, shuffle_buffer=0, drop_last=False))
        alone = LocalWorld(device)  # other ranks' datasets are compared later, by what was read
        placement = Placement.of(config.batch.num_lanes, alone)
        dataset = self.dataset if self.of_stream is None else self.of_stream
        loader = build_loader(
            self.reader_of(dataset),
            config.batch,
            config.data,
            alone,
            placement,
            order=choose_order(config),
            tables=order_tables(self.task, dataset),
        )
        self._schedule = schedule = loader.schedule
        self.num_samples = schedule.num_samples
        max_steps, epochs = config.train.max_steps, config.train.epochs if self.of_stream is None else 1
        self.has_later_epoch = epochs != 1 and (max_steps is None or max_steps > schedule.steps_per_epoch)
        length = RunLength(last_step_of(config, loader) if self.of_stream is None else max_steps)
        self.reader = replace(loader.reader, length=length)
        self._enter(0, 0)
        self.lanes = LaneRunner(self.task, Precision(config.precision, device.type), self.seed)
        self._order = loader.order
        turns = list(schedule.turns(range(schedule.num_lanes), 0, 2))
        self.indices = tuple(index for turn in turns if turn.step == 0 for index in self.indices_of(turn))
        """Dataset indices of the first step."""
        self.turn = self.first_turn(0)
        """The first lane's turn in it."""
        self.other_turn: LaneTurn = next(turn for turn in turns if (turn.step, turn.lane) != (0, 0))
        """Another turn: of another lane, or of the next step."""
        self.next_turn: LaneTurn = next(turn for turn in turns if turn.step == 1)
        """The first lane's turn in the next step."""

    @cached_property
    def eval_datasets(self) -> Mapping[str, Dataset[Any]]:
        """The datasets to evaluate on."""
        if self._data_of is not None:
            return self._data_of.eval_datasets
        sets = eval_datasets_of(self.task).items()
        return {
            name: readable(dataset, self.seed, self._batch, self._missing, name) for name, dataset in sets
        }

    def reader_of(self, dataset: Dataset[Any], eval_dataset: str = "") -> LaneReader:
        """Return what reads the samples of a dataset, or one that is evaluated."""
        return LaneReader(
            dataset,
            self.task.collate,
            self.seed,
            eval_dataset=eval_dataset,
            missing=self._missing,
            fills_empty=True,
        )

    def reader_again(self) -> LaneReader:
        """Return what reads the samples again: the same reader, or one of a stream that is opened anew."""
        again = self._first_samples()
        return self.reader if again is None else replace(self.reader, dataset=again)

    def _first_samples(self) -> FirstSamples | None:
        if not is_stream(self.dataset):
            return None
        return FirstSamples(self.dataset, self.seed, self._batch, 2, missing=self._missing)

    def first_turn(self, lane: int) -> LaneTurn:
        """Return a lane's turn in the first step, without positions where the lane is empty there."""
        return next(self._schedule.turns(range(lane, lane + 1), 0, 1))

    def indices_of(self, turn: LaneTurn) -> tuple[int, ...]:
        """Return the dataset indices of a turn."""
        return self._order.samples(turn)

    def read(self, turn: LaneTurn | None = None) -> Any:
        """Read and collate the micro-batch of a turn, by default that of the first lane."""
        turn = turn or self.turn
        return self.reader[turn, self.indices_of(turn)].data

    def collate(self, samples: Sequence[Any], seed: int) -> Any:
        """Make a micro-batch of copies of some samples."""
        set_random_state(seed)
        self._enter(0, 0)
        return self.task.collate(copy.deepcopy(samples))  # which collate may change

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return all parameters and buffers by name, including those that are not in the state dict."""
        return {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}

    def _enter(self, step: int, epoch: int) -> None:
        """Set the progress that the user's code sees."""
        assert self.reader.length is not None
        PROGRESS.set((step, epoch, self.reader.length))

    def lane(self, turn: LaneTurn, batch: Any) -> TaskLane:
        """Return a lane of the run with a copy of its micro-batch, which a forward may change."""
        self._enter(turn.step, turn.epoch)
        data, indices = move(copy.deepcopy(batch), self.device), self.indices_of(turn)
        return self.lanes.lane(LaneBatch(turn, indices, data, len(indices)))

    def lane_of(self, samples: Sequence[Any], seed: int = 0) -> TaskLane:
        """Return a lane with a micro-batch of these samples and with random numbers of this seed."""
        data = move(self.collate(samples, 0), self.device)
        return TaskLane(self.lanes, LaneBatch(self.turn, (), data, len(samples)), lambda *_: seed)

    def gradients(self, lane: TaskLane) -> tuple[LaneLoss, dict[str, torch.Tensor]]:
        """Return the loss of a lane, and the gradient of its sum for every trained parameter."""
        self.model.zero_grad()
        loss = lane.run(self.model)
        if loss.sum is not None:
            loss.sum.backward()
        trained = ((name, weight) for name, weight in self.model.named_parameters() if weight.requires_grad)
        gradients = {
            name: torch.zeros_like(weight) if weight.grad is None else weight.grad for name, weight in trained
        }
        self.model.zero_grad()
        return loss, gradients

    def run(self, turn: LaneTurn, batch: Any) -> str:
        """Return the digest of loss and gradients of a micro-batch; weights and buffers do not change."""
        with self.kept_state():
            loss, gradients = self.gradients(self.lane(turn, batch))
        return digest(loss.sum, loss.weight, gradients)

    @contextmanager
    def kept_state(self) -> Iterator[None]:
        """Restore weights and buffers afterwards."""
        weights = [(weight, weight.detach().clone()) for weight in self.model.parameters()]
        with kept_buffers([self.model]):
            yield
        with torch.no_grad():
            for parameter, weight in weights:
                if not torch.equal(parameter, weight):
                    parameter.copy_(weight)

    @contextmanager
    def other_weights(self, seed: int, scale: float = 1.0) -> Iterator[None]:
        """Add noise to the weights and multiply them by a factor; restore them afterwards."""
        set_random_state(seed)
        with self.kept_state():
            for parameter in self.model.parameters():
                if parameter.is_floating_point() or parameter.is_complex():
                    with torch.no_grad():
                        parameter.add_(torch.randn_like(parameter), alpha=_NOISE).mul_(scale)
            yield


def chosen(samples: Sequence[Any], positions: Sequence[int]) -> Sequence[Any]:
    """Return the samples at some positions."""
    return samples.take(positions) if isinstance(samples, Rows) else [samples[number] for number in positions]


def evaluate_batch(
    lanes: LaneRunner,
    model: nn.Module,
    datasets: Mapping[str, Dataset[Any]],
    world: World,
    config: RunConfig,
    reducer: Reducer | None = None,
    *,
    has_metrics: bool = True,
) -> dict[str, float]:
    """Evaluate at most a global batch of each dataset; see `Evaluator` and `IndexedSet`.

    Collective: every rank must call this.
    """
    sets, batch, missing = [], config.batch, config.data.missing
    for name, given in datasets.items():
        dataset = readable(given, lanes.seed, batch, missing, name)
        num_samples = min(count_samples(dataset), batch.global_batch_size)
        schedule = SequentialSchedule(num_samples, batch.num_lanes, batch.micro_batch_size)
        reader = LaneReader(dataset, lanes.task.collate, lanes.seed, eval_dataset=name, missing=missing)
        sets.append(IndexedSet(name, reader, schedule, has_metrics))
    placement = Placement.of(batch.num_lanes, world)
    return Evaluator(lanes, model, sets, world, placement, reducer=reducer).run() if sets else {}
