"""Evaluation while training: on which datasets, after which steps, and which result is the best."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, final

from torch import nn

from lanewise.config import EarlyStoppingConfig, EvaluateConfig, RunConfig
from lanewise.config.better import Mode, mode_by_name
from lanewise.config.check import nearest
from lanewise.data import StepEnd
from lanewise.engine.evaluation.eval_set import build_eval_set
from lanewise.engine.evaluation.evaluator import Evaluator
from lanewise.engine.samples.dataset import eval_datasets_of
from lanewise.engine.step.lanes import LaneRunner
from lanewise.engine.step.metrics import LogInterval
from lanewise.engine.step.totals import StepTotals
from lanewise.errors import ConfigError, TaskError
from lanewise.lanes import Placement
from lanewise.processes.world.world import World
from lanewise.reduce import Reducer

_TAKEN = ("train", "perf", "data", "memory")
"""The groups of what training logs."""
_TRAINING_LOSS = "train/loss_epoch"


@final
class EarlyStopping:
    """Counts the evaluations since the best one. All ranks get the same values, so they count alike.

    Args:
        config: which metric to follow, with its mode, and after how many evaluations without improvement to
            stop.
    """

    def __init__(self, config: EarlyStoppingConfig) -> None:
        self.config = config
        self._sign = 1 if config.mode == "max" else -1
        self._best = -math.inf
        self._num_without = 0

    @property
    def is_over(self) -> bool:
        """Whether the run must end."""
        return self._num_without >= self.config.patience

    def note(self, value: float) -> None:
        """Record the value of an evaluation. NaN is never an improvement."""
        if self._sign * value > self._best + self.config.min_delta:
            self._best, self._num_without = float(self._sign * value), 0
        else:
            self._num_without += 1

    def describe(self) -> str:
        """Return why the run ends."""
        best = "nothing but NaN" if self._best == -math.inf else f"{self._sign * self._best:g}"
        delta = f" by more than {self.config.min_delta:g}" if self.config.min_delta else ""
        return (
            f"early stopping: {self._num_without} evaluations found no {self.config.metric} better than "
            f"{best}{delta}"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        followed = {"metric": self.config.metric, "mode": self.config.mode}
        return {**followed, "best": self._best, "num_without": self._num_without}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state; start from the beginning if it is of another metric or another mode.

        Raises:
            ValueError: if `state` is not what `state_dict` returns.
        """
        best, num_without = state["best"], state["num_without"]
        if len(state) > 4 or not isinstance(best, float) or type(num_without) is not int or num_without < 0:
            raise ValueError(f"not a state of early stopping: {state!r:.100}")
        is_same = (state["metric"], state["mode"]) == (self.config.metric, self.config.mode)
        self._best = best if is_same and not math.isnan(best) else -math.inf
        self._num_without = num_without if is_same else 0


@final
class Evaluation:
    """Decides when to evaluate while training, and which result is the best so far.

    Args:
        config: how often to evaluate, which value to compare, and when to end the run early.
        evaluator: runs the evaluations.

    Raises:
        ConfigError: if the configuration names a value that no evaluation can have.
    """

    def __init__(self, config: EvaluateConfig, evaluator: Evaluator) -> None:
        self._evaluator = evaluator
        self._needed = _needed_values(config)
        self._training = LogInterval(1, None) if _TRAINING_LOSS in self._needed.values() else None
        # A metric may have several values, whose names are known after the first evaluation only.
        for name, value in self._needed.items():
            if value != _TRAINING_LOSS and not any(
                value == key or (value.startswith(f"{key}/") and not key.endswith("/loss"))
                for key in evaluator.keys
            ):
                raise _no_such_value(name, value, evaluator.keys)
        self.config = with_modes(config, evaluator.modes)
        """The section, with the modes of the values that it names."""
        self.sign = -1 if self.config.best_mode == "min" else 1
        self.best_value = -math.inf
        """The best value so far, times -1 where a lower value is better."""
        self.best_step: int | None = None
        """The step, from 1, whose model that is of; None where there is none."""
        self.last_values: dict[str, float] = {}
        """The values of the last evaluation; empty before the first one."""
        self.is_due = False
        """Whether an evaluation must follow the last step that was taken, and is not done yet."""
        stopping = self.config.early_stopping
        self.early_stopping = None if stopping is None else EarlyStopping(stopping)
        parts = {"early_stopping": self.early_stopping, "train": self._training}
        self._parts = {name: part for name, part in parts.items() if part is not None}
        """What has a state of its own."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        state = {
            "best": self.best_value,
            "best_step": self.best_step,
            "last": self.last_values,
            "is_due": self.is_due,
        }
        return state | {name: part.state_dict() for name, part in self._parts.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state.

        Raises:
            ValueError: if `state` is not what `state_dict` returns.
        """
        best, last, is_due = state["best"], state["last"], state["is_due"]
        best_step = state.get("best_step")
        if not all(isinstance(key, str) and isinstance(value, float) for key, value in last.items()):
            raise ValueError(f"not the values of an evaluation: {last!r:.100}")
        others = state.keys() - {"best", "best_step", "last", "is_due", "early_stopping", "train"}
        has_types = (type(best), type(is_due)) == (float, bool) and isinstance(best_step, int | None)
        if not has_types or others:
            raise ValueError(f"not a state of the evaluation: {state!r:.100}")
        for name in self._parts.keys() & state.keys():
            self._parts[name].load_state_dict(state[name])
        self.best_value, self.best_step = (-math.inf if math.isnan(best) else best), best_step
        self.last_values, self.is_due = dict(last), is_due

    def forget_best(self) -> None:
        """Forget the best value, which was of another metric or another mode (min or max)."""
        self.best_value, self.best_step = -math.inf, None

    @property
    def datasets(self) -> Mapping[str, Any]:
        """The datasets to evaluate on, by name."""
        return {eval_set.name: eval_set.reader.dataset for eval_set in self._evaluator.sets}

    @property
    def best(self) -> tuple[int, float] | None:
        """The step, from 1, of the best model, and its value; None where there is none."""
        return None if self.best_step is None else (self.best_step, self.sign * self.best_value)

    @property
    def ends_run(self) -> bool:
        """Whether the evaluations so far end the run before its last step."""
        return self.early_stopping is not None and self.early_stopping.is_over

    @property
    def last_value(self) -> float | None:
        """The value of `evaluate.best` in the last evaluation; None before it, or where no value is named."""
        return None if self.config.best is None else self.last_values.get(self.config.best)

    def note_step(self, step: int, totals: StepTotals, end: StepEnd, *, ends_run: bool) -> None:
        """Record that a step was taken, and set whether an evaluation is due after it."""
        if self._training is not None:
            self._training.add(step, totals)
        is_epoch = end.ends_epoch and (end.epoch + 1) % self.config.every_epochs == 0
        every_steps = self.config.every_steps
        is_wanted = is_epoch if every_steps is None else (step + 1) % every_steps == 0
        self.is_due = is_wanted or ends_run

    def take_over(self, values: Mapping[str, float]) -> None:
        """Take the values that this evaluation gave when the run was trained, in place of `run`."""
        self.is_due, self.last_values = False, dict(values)
        if self._training is not None:
            self._training.take()

    def run(self, wants_stop: Callable[[], bool] = lambda: False) -> tuple[dict[str, float], bool]:
        """Evaluate; return the values, and whether they are the best so far.

        All ranks have the same values, so they decide alike without further communication.

        Collective: every rank must call this.

        Args:
            wants_stop: see `Evaluator.run`.

        Raises:
            PreemptedError: on every rank, if one was asked to stop; the evaluation stays due.
            ConfigError: if the configuration names a value that this evaluation lacks; it stays due, too.
        """
        values = self._evaluator.run(wants_stop)
        for name, value in self._needed.items():
            if value not in {*values, _TRAINING_LOSS}:
                raise _no_such_value(name, value, values)
        self.is_due = False
        if self._training is not None:
            values[_TRAINING_LOSS] = self._training.take().loss
        if self.early_stopping is not None:
            self.early_stopping.note(values[self.early_stopping.config.metric])
        self.last_values = values
        if self.config.best is None:
            return values, False
        signed = self.sign * values[self.config.best]
        is_best = signed > self.best_value  # False for NaN
        if is_best:
            self.best_value = signed
        return values, is_best


def build_evaluator(
    config: RunConfig,
    lanes: LaneRunner,
    model: nn.Module,
    world: World,
    placement: Placement,
    reducer: Reducer | None = None,
) -> Evaluator | None:
    """Build the evaluator of the task's eval datasets; None if the task has none.

    Collective: every rank must call this, with the same configuration.

    Args:
        config: the run.
        lanes: runs the lanes of the user's task.
        model: the module to evaluate, on its device.
        world: the processes.
        placement: which process carries which lanes.
        reducer: the reducer that holds the model during training; None outside of training.

    Raises:
        DataError: if a dataset is empty, or differs between ranks.
        TaskError: if a metric cannot be merged, or a dataset has a name that is taken.
    """
    sets = []
    for name, dataset in eval_datasets_of(lanes.task).items():
        if name in _TAKEN:
            raise TaskError(
                f"an eval dataset must not be called {name}: its values would stand among those of {name}/ "
                f"that training logs. Call it {name}_set, for example."
            )
        eval_set = build_eval_set(
            name,
            dataset,
            lanes.task.collate,
            lanes.seed,
            samples_per_lane=config.batch.micro_batch_size,
            world=world,
            placement=placement,
            missing=config.data.missing,
        )
        eval_set.describe(config.data.num_workers, world, placement)
        sets.append(replace(eval_set, pin_memory=config.data.pin_memory))
    if not sets and not _needed_values(config.evaluate):
        return None
    return Evaluator(lanes, model, sets, world, placement, config.data.num_workers, reducer)


def _needed_values(config: EvaluateConfig) -> dict[str, str]:
    """Return the values that an evaluation must have, by the keys of the configuration that name them."""
    named = {"evaluate.best": config.best}
    if config.early_stopping is not None:
        named["evaluate.early_stopping.metric"] = config.early_stopping.metric
    return {name: value for name, value in named.items() if value is not None}


def with_modes(config: EvaluateConfig, modes: Mapping[str, Mode]) -> EvaluateConfig:
    """Return the section with the modes that it leaves open: as the metrics say, or else their names.

    Args:
        config: the section.
        modes: of the metrics that tell it themselves, by `set/metric`.

    Raises:
        ConfigError: if neither a metric nor its name tells.
    """

    def mode_of(value: str, given: Mode | None, key: str) -> Mode:
        metric = next((name for name in modes if f"{value}/".startswith(f"{name}/")), "")
        mode = given or modes.get(metric) or mode_by_name(value)
        if mode is None:
            raise ConfigError(
                f"{key} must be given: neither the metric {value}, by higher_is_better, nor its name says "
                f"whether more of it is better. Set {key} to max or min."
            )
        return mode

    best, stopping = config.best, config.early_stopping
    if best is not None:
        config = replace(config, best_mode=mode_of(best, config.best_mode, "evaluate.best_mode"))
    if stopping is not None:
        given = stopping.mode or (config.best_mode if stopping.metric == best else None)
        mode = mode_of(stopping.metric, given, "evaluate.early_stopping.mode")
        config = replace(config, early_stopping=replace(stopping, mode=mode))
    return config


def _no_such_value(key: str, value: str, values: Iterable[str]) -> ConfigError:
    """Return the error of a key that names a value which no evaluation has."""
    near = nearest(value, [*values, _TRAINING_LOSS], cutoff=0.8)
    known = f"{', '.join(values) or '(the task has no eval_datasets)'}, {_TRAINING_LOSS}"
    return ConfigError(
        f"{key} must be a value of an evaluation: got {value}.{f' Did you mean {near}?' if near else ''} Use "
        f"one of {known}. Of a metric with several values name one, as set/metric/name."
    )
