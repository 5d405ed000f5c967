"""Evaluating while training: on what, when, and which of the results is the best."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

from lanewise.config import Mode, RunConfig
from lanewise.data import LaneReader
from lanewise.engine.dataset import compare_datasets, count_samples
from lanewise.engine.evaluate import EvalSet, Evaluator
from lanewise.errors import ConfigError, DataError
from lanewise.lanes import Schedule, SequentialSchedule
from lanewise.precision import Precision
from lanewise.reduce import Reducer
from lanewise.task import Task
from lanewise.world.world import World


class Evaluation:
    """When to evaluate while training, and which of the results is the best so far.

    Args:
        evaluator: evaluates.
        every_steps: steps from one evaluation to the next; the last step of the run is always one.
        last_step: the step before which training ends.
        best: key of the value by which models are compared; None compares none.
        best_mode: whether more of it is better, or less.

    Raises:
        ConfigError: if surely no evaluation gives that value.
    """

    def __init__(
        self, evaluator: Evaluator, every_steps: int, last_step: int, best: str | None, best_mode: Mode
    ) -> None:
        self._evaluator = evaluator
        self._every_steps = every_steps
        self._last_step = last_step
        self._best = best
        self.sign = 1 if best_mode == "max" else -1
        self.best_value = -math.inf
        """The best value so far, times -1 where less is better."""
        self.last_values: dict[str, float] = {}
        """What the last evaluation gave; empty before it."""
        self.is_due = False
        """Whether a step that was taken has an evaluation after it that was not made yet."""
        # A metric may have several values, whose names its first evaluation tells.
        if best is not None and not any(
            best == key or (best.startswith(f"{key}/") and not key.endswith("/loss"))
            for key in evaluator.keys
        ):
            raise _no_such_value(best, evaluator.keys)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {"best": self.best_value, "last": self.last_values, "is_due": self.is_due}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`.

        Raises:
            ValueError: if it is none.
        """
        best, last, is_due = state["best"], state["last"], state["is_due"]
        if not all(isinstance(key, str) and type(value) in (int, float) for key, value in last.items()):
            raise ValueError(f"an evaluation gave {last!r:.100}")
        if not isinstance(best, float) or not isinstance(is_due, bool) or len(state) > 3:
            raise ValueError(f"an evaluation has no state {state!r:.100}")
        self.best_value = -math.inf if math.isnan(best) else best
        self.last_values, self.is_due = dict(last), is_due

    def forget_best(self) -> None:
        """Look for the best value anew, as it was of another metric, or the other way round."""
        self.best_value = -math.inf

    @property
    def last_value(self) -> float | None:
        """The value that the last evaluation gave; None before it, and where none is compared."""
        return None if self._best is None else self.last_values.get(self._best)

    def note_step(self, step: int) -> None:
        """Learn that a step was taken, after which an evaluation may be due."""
        self.is_due = (step + 1) % self._every_steps == 0 or step + 1 == self._last_step

    def run(self, wants_stop: Callable[[], bool] = lambda: False) -> tuple[dict[str, float], bool]:
        """Evaluate, and tell whether this is the best so far. Collective: every rank must call this.

        All ranks have the same values, so they decide alike without asking each other.

        Args:
            wants_stop: see `Evaluator.run`.

        Raises:
            PreemptedError: on every rank, if one was asked to stop; the evaluation is still due then.
            ConfigError: if no value is called as the one to compare by; it is still due then as well.
        """
        values = self._evaluator.run(wants_stop)
        if self._best is not None and self._best not in values:
            raise _no_such_value(self._best, values)
        self.is_due = False
        self.last_values = values
        if self._best is None:
            return values, False
        value = self.sign * values[self._best]
        is_best = value > self.best_value  # never for a NaN
        if is_best:
            self.best_value = value
        return values, is_best


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
        schedule = SequentialSchedule(num_samples, config.batch.num_lanes, config.batch.micro_batch_size)
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


def _no_such_value(best: str, keys: Iterable[str]) -> ConfigError:
    return ConfigError(
        f"evaluate.best must be a value of an evaluation: got {best}. "
        f"Use one of {', '.join(keys) or '(the task has no eval_datasets)'}."
    )
