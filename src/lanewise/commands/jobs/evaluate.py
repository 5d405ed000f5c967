"""Evaluating a trained model, and predicting with it."""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, final

from lanewise.commands.jobs.job import Job
from lanewise.config import RunConfig
from lanewise.config.check import expand_user
from lanewise.config.file import READERS
from lanewise.config.load import Override, load_config
from lanewise.config.trust import distrust, run_around
from lanewise.errors import CheckpointError, ConfigError
from lanewise.runs.dir import RunDir
from lanewise.runs.report.lines import JsonLinesReader, count_of
from lanewise.runs.report.status import read_status
from lanewise.runs.report.weights import find_weights, written_at

if TYPE_CHECKING:
    from lanewise.processes.world.world import World
    from lanewise.task import Task

logger = logging.getLogger(__name__)


@final
@dataclass(frozen=True, kw_only=True)
class EvaluateJob(Job):
    """Evaluates a model on the task's eval datasets, or computes its outputs on one of them.

    The result is every value by `set/metric` and the number of samples by set, or the name of the dataset and
    a list of one output for each sample, in dataset order; of a lane-aware stream lane after lane.
    """

    model_file: Path
    text: str
    """A line that says which weights these are."""
    progress: tuple[int, int, int | None] | None = None
    """How many steps its weights were trained, the epoch of the last one, and how many steps the run has."""
    trains: ClassVar[bool] = False
    predicts: bool = False
    """Whether to compute outputs instead of evaluating."""
    dataset: str | None = None
    """Name of the eval dataset whose outputs are computed; None: the only one that there is."""

    def run(self, world: "World") -> Any:
        from lanewise.engine.evaluation.evaluation import build_evaluator
        from lanewise.engine.precision import Precision
        from lanewise.engine.run.build import build_model, build_task, transform
        from lanewise.engine.step.lanes import LaneRunner
        from lanewise.errors import TaskError
        from lanewise.lanes import PROGRESS, Placement, RunLength
        from lanewise.processes.device.determinism import fix_imported_compiler
        from lanewise.runs.checkpoint.model_file import load_model

        config = self.config
        logger.info("%s", self.text)
        task = self.task or build_task(config)
        model = transform(build_model(task, config.train.seed), config, world.device)
        if config.distributed.equality == "exact":
            fix_imported_compiler()
        load_model(model, self.model_file)
        lanes = LaneRunner(task, Precision(config.precision, world.device.type), config.train.seed)
        placement = Placement.of(config.batch.num_lanes, world)
        evaluator = build_evaluator(config, lanes, model.to(world.device), world, placement)
        if evaluator is None or not evaluator.sets:
            raise TaskError(
                f"{type(task).__name__} has no eval_datasets: there is nothing to evaluate on. Give the "
                "task this method, which returns datasets by name."
            )
        progress = self.progress and (*self.progress[:2], RunLength(self.progress[2]))
        PROGRESS.set(progress)  # also None, since there may be that of a run before
        if self.predicts:
            name = self.dataset or evaluator.only_set
            return {"dataset": name, "outputs": evaluator.predict(name)}
        return {"values": evaluator.run(), "num_samples": evaluator.num_samples}


OBJECT = "an object of "
"""How the text begins that stands in a run's configuration for an argument that was no plain value."""


def evaluate_job(
    run_or_model: Path,
    overrides: Sequence[Override] = (),
    *,
    task: "Task | None" = None,
    trust: bool = False,
    weights: str | Path | None = None,
    predicts: bool = False,
    dataset: str | None = None,
) -> EvaluateJob:
    """Find a model, and evaluate it with the configuration that it was trained with.

    A run may be somebody else's, so that code which came with it, or which it names, runs only if the user
    trusts it or names its folder; see `distrust`.

    Args:
        run_or_model: a run directory; a file of weights in one, such as its `best.safetensors`; or, with a
            file for `weights`, a configuration file.
        overrides: of the configuration; without one of the devices, one process evaluates.
        task: the user's task, where it was given as an object; None: built from the configuration.
        trust: whether code that came with the run may run.
        weights: `best` or `last` of the run, as `find_weights` takes it; or a file that lies elsewhere, in
            place of the run's.
        predicts: as in `EvaluateJob`.
        dataset: as in `EvaluateJob`.

    Raises:
        CheckpointError: if there is no such model.
        ConfigError: if the configuration has a mistake.
    """
    run_or_model = Path(expand_user(str(run_or_model)))
    is_file = run_or_model.suffix == ".safetensors"
    run_dir = RunDir(run_or_model.parent if is_file else run_or_model)
    is_config = run_or_model.suffix in READERS and run_or_model.is_file()
    which = str(weights or "")
    names_file = which not in ("", "best", "last")
    if is_config and not names_file:
        raise ConfigError(
            f"{run_or_model} is a configuration, which has no weights. Give some by --weights FILE, or name "
            "a run_dir."
        )
    config_file = run_or_model if is_config else run_dir.config
    _require(config_file, run_or_model)
    # An evaluation normalises by running statistics, so it has none of the conditions of SyncBatchNorm.
    replaced = {"devices": "null", "sync_batch_norm": "false", "launcher": "local"}
    replaced |= {"hosts": "[]", "hostfile": "null", "nodes": "null"}
    of_training = [Override(f"distributed.{key}", value) for key, value in replaced.items()]
    config = load_config(str(config_file), [*of_training, *overrides])
    model_file = Path(which or run_or_model)
    text = f"weights: {model_file}"
    if not names_file and (which or not is_file):
        model_file, text = find_weights(run_dir.path, which, averages=config.train.ema_decay is not None)
    _require(model_file, which if names_file else run_or_model, is_run=not names_file)
    if task is None:
        require_buildable(config, run_dir)
    untrusted: tuple[str, ...] = ()
    of_run = run_around(config_file) if is_config else run_dir.path
    if not trust and of_run is not None:
        config, untrusted = distrust(of_run, config, overrides)
    return EvaluateJob(
        config,
        task,
        untrusted=untrusted,
        model_file=model_file,
        text=text,
        progress=_progress_of(run_dir, model_file),
        predicts=predicts,
        dataset=dataset,
    )


def _progress_of(run_dir: RunDir, model_file: Path) -> tuple[int, int, int | None] | None:
    """Return where in its run a model of a run directory was written; None for another file."""
    number, _ = written_at(run_dir).get(model_file, (None, ""))
    if number is None:
        return None
    lines = JsonLinesReader(run_dir.metrics)
    epochs = [
        count_of(line.get("epoch")) or 1 for line in lines if (count_of(line.get("step")) or 0) <= number
    ]
    return number, max(epochs, default=1) - 1, read_status(run_dir.path).last_step


def _require(file: Path, given: Path | str, *, is_run: bool = True) -> None:
    if not os.path.exists(file):  # noqa: PTH110 - Path raises where a name is too long
        raise CheckpointError(
            f"{given} is no {'finished run' if is_run else 'file of weights'}: there is no {file}. "
            "Name a run_dir or a .safetensors file in one, or give --weights best, last or FILE."
        )


def require_buildable(config: RunConfig, run_dir: RunDir) -> None:
    """Find out whether the task of a run can be built of its configuration.

    Raises:
        CheckpointError: an argument was no plain value.
        ConfigError: the folder of the task's code is gone, and the code is nowhere else.
    """
    if found := _find_object(config.task.init_args):
        raise CheckpointError(
            f"the task of {run_dir.path} cannot be built again: {found[0]} was {found[1]}. "
            "From Python, give the task too (task=)."
        )
    module, search_path = config.task.class_path.partition(".")[0], config.search_path
    is_gone = search_path is not None and not Path(search_path).is_dir()
    if is_gone and module.isidentifier() and find_spec(module) is None:
        raise ConfigError(
            f"the run's project folder {search_path} is not there any more: it had the module {module}. "
            "Give --search_path FOLDER, where it is now."
        )


def _find_object(value: object, name: str = "init_args") -> tuple[str, str] | None:
    """Return the dotted name and the text of the first argument that was no plain value, however deep."""
    if isinstance(value, str):
        return (name, value) if value.startswith(OBJECT) else None
    if isinstance(value, list):
        value = dict(enumerate(value))
    items = value.items() if isinstance(value, Mapping) else ()
    return next(filter(None, (_find_object(item, f"{name}.{key}") for key, item in items)), None)
