"""What `lanewise` offers to Python: train, evaluate and predict, each in fresh processes."""

import dataclasses
import inspect
import json
import sys
from collections.abc import Collection, Mapping, MutableSequence, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Required, TypedDict, Unpack

from lanewise.commands.jobs.evaluate import OBJECT, evaluate_job
from lanewise.commands.jobs.job import Job
from lanewise.commands.jobs.start import start
from lanewise.commands.jobs.train import TrainJob
from lanewise.config import MAY_DIFFER, RunConfig
from lanewise.config.check import read_section
from lanewise.config.class_path import add_search_path, is_of_script, refuse_in_import
from lanewise.config.classes import build, check_classes
from lanewise.config.load import Override
from lanewise.config.tree import plain_tree
from lanewise.errors import ConfigError, LaunchError, raised_at_call
from lanewise.runs.callback import Callback
from lanewise.runs.dir import RunDir
from lanewise.runs.report.weights import find_weights

if TYPE_CHECKING:
    from torch import nn

    from lanewise.task import Task

Section = Mapping[str, Any]


class Sections(TypedDict, total=False):
    """The sections of a configuration, as `train` takes them."""

    batch: Required[Section]
    train: Required[Section]
    optimizer: Required[Section]
    scheduler: Section | str | None
    precision: str
    memory: Section | None
    compile: Section | str | None
    data: Section | None
    log: Section | None
    evaluate: Section | None
    checkpoint: Section | None
    integrity: Section | None
    distributed: Section | None


@dataclass(frozen=True)
class TrainResult:
    """What `train` returns."""

    run_dir: Path
    """The folder of the run; where `train.run_dir` is a pattern, what it stood for."""
    step: int
    """The last step that was taken, whose model the run ended with."""
    evaluation: Mapping[str, float]
    """What the last evaluation gave, by `set/metric`; empty where the task has no eval datasets."""
    best_step: int | None
    """The step after which the best model was written; None where `evaluate.best` names no metric."""
    best_value: float | None
    """The best model's value of that metric."""
    task: "Task"

    @property
    def model_file(self) -> Path:
        """The trained weights."""
        return RunDir(self.run_dir).model

    @property
    def best_model_file(self) -> Path | None:
        """The weights of the best model; None where there is none."""
        return None if self.best_step is None else RunDir(self.run_dir).best_model

    def model(self, weights: str | None = None) -> "nn.Module":
        """Return a new model with the trained weights, on the CPU and in evaluation mode; see `load`."""
        return load_weights(new_model(self.task), *find_weights(self.run_dir, weights)).eval()


@raised_at_call
def train(
    task: "Task",
    *,
    callbacks: Sequence[Callback] = (),
    resume: bool = False,
    allow: Collection[str] = (),
    overwrite: bool = False,
    **sections: Unpack[Sections],
) -> TrainResult:
    """Train a task; the other arguments are the sections of a configuration file, as mappings.

    The training runs in fresh processes, one for each device, to which the task is sent; so a task may be
    defined in a script or in a notebook. Under torchrun, Slurm or MPI it runs in the processes that are
    there.

    Args:
        task: what to train.
        batch: `{"global_batch_size": 64, "micro_batch_size": 16}`.
        train: `{"epochs": 3, "run_dir": "runs/digits"}` and more.
        optimizer: `{"class_path": "torch.optim.AdamW", "init_args": {"lr": 1e-3}}`.
        scheduler: `"cosine"`, or `{"name": "cosine", "warmup": 0.05}`, or a class likewise.
        precision: `float32`, `tf32`, `bf16` or `fp16`.
        memory: `{"activation_checkpointing": "auto"}`: what is traded for memory.
        compile: `auto`, `whole` or a mapping: what torch.compile makes faster.
        data: how samples are ordered and loaded.
        log: how often metrics are written.
        evaluate: when to evaluate.
        checkpoint: how often to save, and how many checkpoints to keep.
        integrity: how often to write digests of the state, and to compare what processes have alike.
        distributed: which devices to use; `devices` unset: one, as on the command line.
        callbacks: observe the run on rank 0, in its process.
        resume: whether to go on from the newest good checkpoint in run_dir, if there is one.
        allow: what may differ from the checkpoint on resume: `"optimizer"`, or several names; see `--allow`.
        overwrite: whether to remove the run that is in run_dir, if there is one, and begin anew.

    Returns:
        Where the run is, and what its last evaluation gave.

    Raises:
        ConfigError: lists every mistake in the sections.
        LanewiseError: what the first failing process raised; a LaunchError where that is no error of ours.
        PreemptedError: a signal stopped the run, which saved a checkpoint first.
    """
    refuse_in_import("lanewise.train")
    if foreign := [type(c).__name__ for c in list[object](callbacks) if not isinstance(c, Callback)]:
        raise ConfigError(
            f"callbacks must be of lanewise.Callback: got {', '.join(foreign)}. evaluate.early_stopping, "
            "evaluate.best and checkpoint do that here, and learning rates are logged; derive others from it."
        )
    config = config_of(task, **sections)
    if overwrite and resume:
        raise ConfigError(
            "overwrite starts over, and resume continues: got True for both. Leave one of them out."
        )
    if allow and not resume:
        raise ConfigError("allow says what may differ on resume: add resume=True, or leave it out.")
    allow = (allow,) if isinstance(allow, str) else tuple(allow)
    if unknown := sorted(set(allow) - set(MAY_DIFFER)):
        raise ConfigError(
            f"allow lists what may differ, out of {', '.join(MAY_DIFFER)}: got {', '.join(unknown)}."
        )
    job = TrainJob(config, task, tuple(callbacks), resume, allow, overwrite)
    result = start_fresh(job)
    return TrainResult(**{**result, "run_dir": Path(result["run_dir"]), "task": task})


def config_of(task: "Task", **sections: Unpack[Sections]) -> RunConfig:
    """Return the configuration of a run whose task and sections were given to a function.

    Raises:
        ConfigError: lists every mistake in the sections.
    """
    class_config, search_path = _describe_task(task)
    given = {"task": class_config, "search_path": search_path, **sections}
    return read_section(RunConfig, {key: plain_tree(part) for key, part in given.items() if part is not None})


@raised_at_call
def evaluate(
    run_or_model: str | Path,
    *,
    task: "Task | None" = None,
    weights: str | Path | None = None,
    devices: int | Sequence[int | str] | None = None,
    trust: bool = False,
) -> dict[str, float]:
    """Evaluate a trained model on the eval datasets of its task.

    Args:
        run_or_model: a run directory; a .safetensors file in one; or, with `weights`, a configuration file.
        task: None: built again from the arguments that the run noted, if they are plain values.
        weights: `best` or `last` of the run, or a .safetensors file that lies elsewhere; see `load`.
        devices: processes, as in the configuration; None: one.
        trust: whether code that lies in the run directory may run.

    Returns:
        Every value by `set/metric`, the same on any number of devices.

    Raises:
        CheckpointError: if there is no such model.
        ConfigError: if code that came with the run would run, and `trust` is not set.
        LanewiseError: what the first failing process raised; a LaunchError where that is no error of ours.
    """
    return dict(_run_model(run_or_model, devices, task=task, weights=weights, trust=trust)["values"])


@raised_at_call
def predict(
    run_or_model: str | Path,
    dataset: str | None = None,
    *,
    task: "Task | None" = None,
    weights: str | Path | None = None,
    devices: int | Sequence[int | str] | None = None,
    trust: bool = False,
) -> list[Any]:
    """Compute the outputs of a trained model on one of the eval datasets of its task.

    Args:
        run_or_model: a run directory, or a .safetensors file in one.
        dataset: name of the eval dataset; None: the only one that there is.
        task: None: built again from the arguments that the run noted, if they are plain values.
        weights: `best` or `last` of the run, or a .safetensors file that lies elsewhere; see `load`.
        devices: processes, as in the configuration; None: one.
        trust: whether code that lies in the run directory may run.

    Returns:
        What `Task.predict` gives for each sample, on the CPU, in dataset order; in a prepared world on rank 0
        only, elsewhere nothing.

    Raises:
        CheckpointError: if there is no such model.
        ConfigError: if code that came with the run would run, and `trust` is not set.
        LanewiseError: what the first failing process raised; a LaunchError where that is no error of ours.
    """
    given = {"task": task, "weights": weights, "trust": trust}
    outputs: list[Any] = _run_model(run_or_model, devices, predicts=True, dataset=dataset, **given)["outputs"]
    return outputs


@raised_at_call
def load(
    run_or_model: str | Path,
    *,
    init_args: Mapping[str, Any] | None = None,
    weights: str | Path | None = None,
    trust: bool = False,
) -> "tuple[Task, nn.Module]":
    """Build the task of a run again, and its model with the trained weights, on the CPU for evaluation.

    Args:
        run_or_model: a run directory, or a .safetensors file in one.
        init_args: arguments of the task that take the place of the run's.
        weights: `best`, or `last`: those with which the run ended, with `train.ema_decay` their moving
            average; or a .safetensors file that lies elsewhere. None: the best, where the run keeps them by
            `evaluate.best`, else the last; a line says which.
        trust: whether code that lies in the run directory may run.

    Raises:
        CheckpointError: if there is no such model.
        ConfigError: if the task cannot be built, or code that came with the run would run.
    """
    given = {} if init_args is None else init_args
    overrides = [Override(f"task.init_args.{name}", json.dumps(value)) for name, value in given.items()]
    job = evaluate_job(Path(run_or_model), overrides, trust=trust, weights=weights)
    add_search_path(job.config.search_path)
    check_classes(job.config, untrusted=job.untrusted)
    task: Task = build("task", job.config.task)
    return task, load_weights(new_model(task), job.model_file, job.text).eval()


def new_model(task: "Task") -> "nn.Module":
    """Build the model of a task for weights that are there; the caller's random state stays."""
    from lanewise.processes.device.random_state import kept_random_state

    with kept_random_state():
        return task.build_model()


def load_weights(model: "nn.Module", file: Path, text: str) -> "nn.Module":
    """Copy weights into a model, and return it; show a line that says which they are."""
    from lanewise.runs.checkpoint.model_file import load_model

    print(text, file=sys.stderr)  # noqa: T201 - there is no log
    load_model(model, file)
    return model


def _run_model(run_or_model: str | Path, devices: int | Sequence[int | str] | None, **given: Any) -> Any:
    """Run what `evaluate_job` makes of these arguments."""
    refuse_in_import(f"lanewise.{'predict' if 'predicts' in given else 'evaluate'}")
    chosen = None if devices is None else Override("distributed.devices", json.dumps(devices, default=list))
    job = evaluate_job(Path(run_or_model), list(filter(None, [chosen])), **given)
    if job.task is None and is_of_script(job.config.task):  # which a worker must not import
        check_classes(job.config, untrusted=job.untrusted)
        job = replace(job, task=build("task", job.config.task))
    return start_fresh(job)


def start_fresh(job: Job) -> Any:
    """Run a job in fresh processes, and raise the error of the first that fails as that process did."""
    try:
        return start(job, is_fresh=True)
    except LaunchError as error:
        raise error.cause or error from None


def _describe_task(task: "Task") -> tuple[dict[str, Any], str | None]:
    """Say how a configuration file would name the task, and where its module lies.

    A class of the script that is running is a class of the module that its file is.
    """
    from lanewise.task import Task

    given: object = task
    if not isinstance(given, Task):
        raise ConfigError(
            f"what is trained must be a lanewise.Task: got {given!r:.60}. Give it an object of your class."
        )
    given.loss_method()  # raises where it has none or several
    module_name = type(task).__module__
    file = getattr(sys.modules[module_name], "__file__", None)
    search_path = None
    if file is not None and "site-packages" not in file:
        search_path = str(Path(file).resolve().parents[module_name.count(".")])
    if module_name == "__main__" and file is not None:
        module_name = Path(file).stem
    args, kwargs = task._init_arguments  # type: ignore[attr-defined]  # noqa: SLF001 - noted for this
    signature = inspect.signature(type(task))
    arguments = dict(signature.bind(*args, **kwargs).arguments)
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            arguments |= arguments.pop(parameter.name, {})
    return {
        "class_path": f"{module_name}.{type(task).__qualname__}",
        "init_args": {name: _plain(value) for name, value in arguments.items()},
    }, search_path


def _plain(value: Any) -> Any:
    """Write a value as a configuration file would; else a text that `evaluate_job` knows."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Path):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, MutableSequence | tuple):
        return [_plain(item) for item in value]
    return f"{OBJECT}{type(value).__module__}.{type(value).__qualname__}"
