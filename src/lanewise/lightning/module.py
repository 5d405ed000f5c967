"""Reads a LightningModule and its loaders, and trains it."""

import copy
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler
from torchmetrics import MeanMetric

from lanewise.adapt.loss import LossObserver, rows, spread_samples
from lanewise.adapt.optimizer import BuiltOptimizer
from lanewise.adapt.overridden import overridden
from lanewise.adapt.sections import merged, steps_of
from lanewise.commands.jobs.api import TrainResult, load_weights
from lanewise.commands.jobs.api import train as train_task
from lanewise.engine.evaluation.evaluator import eval_mode
from lanewise.errors import ConfigError, TaskError, raised_at_call
from lanewise.lightning.step import LOGGED, StepKind, TrainerThere, prepared
from lanewise.lightning.task import ModuleParts, ModuleTask
from lanewise.processes.device.random_state import kept_random_state
from lanewise.processes.world.environment import require_no_world
from lanewise.runs.report.weights import find_weights
from lanewise.task import Loss

if TYPE_CHECKING:
    from lanewise.runs.callback import Callback

_OF_DATA = {"prepare_data", "setup"} | {f"{name}_dataloader" for name in ("train", "val", "test", "predict")}
_MAY_OVERRIDE = {
    *(*dir(nn.Module), *_OF_DATA, "configure_optimizers"),
    *("on_before_batch_transfer", "on_after_batch_transfer"),
    *(f"{name}_step" for name in ("training", "validation", "test", "predict")),
}


@raised_at_call
def train(
    module: nn.Module,
    data: Any,
    /,
    val_dataloader: "DataLoader[Any] | None" = None,
    *,
    callbacks: "Sequence[Callback]" = (),
    resume: bool = False,
    allow: Collection[str] = (),
    overwrite: bool = False,
    **sections: Any,
) -> TrainResult:
    """Train a LightningModule in fresh processes. Afterwards it has the trained weights.

    These are the best ones where `evaluate.best` keeps them, else the last.

        lanewise.lightning.train(
            module, datamodule, batch={"global_batch_size": 64}, train={"epochs": 3, "run_dir": "runs/points"}
        )

    Args:
        module: with automatic optimization, and one optimizer.
        data: a LightningDataModule, or the DataLoader for training. Its batch size is that of a micro-batch.
        val_dataloader: beside a DataLoader, the one for validation.
        callbacks: observe the run on rank 0, in its process.
        resume: see `lanewise.train`.
        allow: see `lanewise.train`.
        overwrite: see `lanewise.train`.
        sections: of the configuration, as `lanewise.train` takes them: what a Lightning Trainer would be
            told, and what takes the place of what was read.

    Raises:
        ConfigError: lists all that the module asks for and a run does not do; or torchrun started this
            process.
        TaskError: the loss is no mean over the samples of a micro-batch, and no `Loss`.
        LanewiseError: what the first failing process raised.
    """
    require_no_world("lanewise.lightning.train starts its own processes")
    run = read(module, data, val_dataloader, **sections)
    result = train_task(**run, callbacks=callbacks, resume=resume, allow=allow, overwrite=overwrite)
    load_weights(module, *find_weights(result.run_dir))
    return result


@raised_at_call
def read(
    module: nn.Module, data: Any, /, val_dataloader: "DataLoader[Any] | None" = None, **overrides: Any
) -> dict[str, Any]:
    """Return what `lanewise.train` and `lanewise.verify` need to train a LightningModule.

    For the proof: `lanewise.verify(**lanewise.lightning.read(module, datamodule, ...), devices=(1, 2, 3))`.

    Args:
        module: see `train`.
        data: see `train`.
        val_dataloader: see `train`.
        overrides: sections; see `train`.

    Returns:
        The task and the sections, by the names of their arguments.

    Raises:
        ConfigError: see `train`.
        TaskError: see `train`.
    """
    if mistakes := list(_refusals(module, data, overrides)):
        raise ConfigError(*mistakes)
    loader, validation = _loaders(module, data, val_dataloader)
    size = loader.batch_size
    read_ = {
        "batch": {"global_batch_size": size, "micro_batch_size": size},
        "train": {},
        "data": {"num_workers": loader.num_workers, "drop_last": loader.drop_last},
    }
    if isinstance(loader.sampler, SequentialSampler):
        read_["data"]["order"] = "sequential"
    sections = merged(read_, overrides)
    per_epoch, num_steps = steps_of(sections, len(loader.dataset))
    length = sections["train"]
    known = {"max_epochs": length.get("epochs"), "max_steps": length.get("max_steps") or -1}
    there: Any = module
    counted = {"estimated_stepping_batches": num_steps, "num_training_batches": per_epoch}
    there.trainer = TrainerThere(**known, **counted)
    try:
        optimizer, scheduler, steps_per_value = _optimizer_of(there.configure_optimizers(), per_epoch)
    finally:
        there.trainer = None
    scheduler = None if "scheduler" in overrides else scheduler
    parts = ModuleParts(
        module=copy.deepcopy(module).cpu(),
        trainer=TrainerThere(**known),
        train_dataset=loader.dataset,
        eval_datasets={} if validation is None else {"val": validation.dataset},
        collate=loader.collate_fn,
        optimizer=BuiltOptimizer(optimizer, scheduler, module, steps_per_value),
        metrics={},
    )
    _probe(parts, size)
    return {"task": ModuleTask(parts), **merged({**sections, **parts.optimizer.sections}, overrides)}


def _refusals(module: Any, data: Any, overrides: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a module asks for and a run does not do."""
    name = type(module).__name__
    base = _base(module, "LightningModule")
    if base is None:
        yield f"the module must be a LightningModule: got a {name}. Write a Task for another module."
        return
    if not module.automatic_optimization:
        yield (
            f"{name} has automatic_optimization=False, as a GAN, and steps its optimizers by itself. Train "
            "it in a loop of your own: lanewise.Lanes."
        )
    if own := overridden(module, base, _MAY_OVERRIDE):
        yield f"{name} overrides {', '.join(own)}, which nothing here calls. Write a Task."
    of_data = _base(data, "LightningDataModule")
    if of_data is not None and (own := overridden(data, of_data, _OF_DATA)):
        yield f"{type(data).__name__} overrides {', '.join(own)}, which nothing here calls. Write a Task."
    if of_data is None and not isinstance(data, DataLoader):
        yield f"the data must be a LightningDataModule or a DataLoader: got a {type(data).__name__}."
    if not {"epochs", "max_steps"} & overrides.get("train", {}).keys():
        yield 'train must say how long to train: give train={"epochs": 3, "run_dir": "runs/first"}.'


def _base(given: object, name: str) -> Any:
    """Return Lightning's class of a name from which an object is derived; None where it is not."""
    return next((cls for cls in type(given).__mro__ if cls.__name__ == name), None)


def _loaders(module: Any, data: Any, val_dataloader: Any) -> tuple[Any, Any]:
    """Return the loaders for training and for validation; None where nothing is validated."""
    loader = data
    if not isinstance(data, DataLoader):
        data.prepare_data()
        data.setup("fit")
        loader = data.train_dataloader()
        if "val_dataloader" in overridden(data, _base(data, "LightningDataModule"), ()):
            val_dataloader = data.val_dataloader()
    module.prepare_data()
    module.setup("fit")
    if type(module).validation_step is _base(module, "LightningModule").validation_step:
        val_dataloader = None
    loader = _checked(loader, "training")
    if val_dataloader is None:
        return loader, None
    validation = _checked(val_dataloader, "validation")
    if validation.collate_fn != loader.collate_fn:
        raise ConfigError(
            "the validation loader has another collate_fn than the training loader. Give both the same, or "
            "write a Task."
        )
    return loader, validation


def _checked(loader: Any, name: str) -> Any:
    """Return the only loader that there is; raise ConfigError if a run cannot read its dataset as it does."""
    found = loader[0] if isinstance(loader, list | tuple) and len(loader) == 1 else loader
    if not isinstance(found, DataLoader) or isinstance(found.dataset, IterableDataset):
        raise ConfigError(
            f"the {name} data must be one DataLoader of a dataset with an index: got a "
            f"{type(found).__name__}. Write a Task, which takes streams and several datasets."
        )
    dataset: Any = found.dataset
    sampler: Any = found.sampler
    is_whole = isinstance(sampler, SequentialSampler) or (
        type(sampler) is RandomSampler and not sampler.replacement and len(sampler) == len(dataset)
    )
    if not is_whole or found.batch_size is None:
        raise ConfigError(
            f"the {name} loader has a {type(sampler).__name__} in a {type(found.batch_sampler).__name__}. "
            'Use batch_size, and shuffle=True or False; for another order data={"order": ...}.'
        )
    return found


def _optimizer_of(returned: Any, per_epoch: int) -> tuple[Optimizer, Any, int]:
    """Return the optimizer and the scheduler that configure_optimizers returned, and how often that steps."""
    optimizers: Any = returned
    schedulers: Any = []
    if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[0], list | tuple):
        optimizers, schedulers = returned
    if not isinstance(schedulers, list | tuple):
        schedulers = [schedulers]
    (found, *others) = (optimizers or [None]) if isinstance(optimizers, list | tuple) else [optimizers]
    if isinstance(found, Mapping):
        schedulers = [found["lr_scheduler"]] if "lr_scheduler" in found else []
        found = found["optimizer"]
    if others or len(schedulers) > 1 or not isinstance(found, Optimizer):
        raise ConfigError(
            "configure_optimizers must return one optimizer, and at most one scheduler: got "
            f"{returned!r:.60}. Train several in a loop of your own: lanewise.Lanes."
        )
    (scheduler,) = schedulers or [None]
    options = scheduler if isinstance(scheduler, Mapping) else {"scheduler": scheduler}
    every = options.get("frequency", 1) * (per_epoch if options.get("interval", "epoch") == "epoch" else 1)
    return found, options["scheduler"], every


def _probe(parts: ModuleParts, num_samples: int) -> None:
    """Look at micro-batches: is the loss a mean over samples, and what does validation log."""
    module = prepared(parts.module, parts.trainer)

    def step(data: Any, of_samples: int, kind: StepKind = StepKind.TRAINING, seed: int = 0) -> Any:
        torch.manual_seed(seed)
        return module(kind, data, of_samples)

    def loss(data: Any, of_samples: int, seed: int = 0) -> Any:
        returned = step(data, of_samples, seed=seed).returned
        found = returned.get("loss") if isinstance(returned, Mapping) else returned
        return found if found is None or isinstance(found, Loss) else float(found) * of_samples

    has_shown = not len(parts.train_dataset)
    with eval_mode(module), torch.no_grad(), kept_random_state(), LossObserver(module) as observer:
        for samples in spread_samples(parts.train_dataset, num_samples):
            data, size = parts.collate(samples), len(samples)
            whole = loss(data, size)
            if isinstance(whole, Loss):
                has_shown = True
                break
            if not whole or not math.isfinite(whole):  # as of samples without targets
                continue
            if not has_shown and not observer.is_sum_of_parts(whole, [loss(data, size, seed=1)]):
                raise TaskError(f"training_step draws random numbers in evaluation mode. {_REMEDY}")
            has_shown = True
            single = [loss(rows(data, size, row), 1) or 0.0 for row in range(size)]
            if observer.reasons or not observer.is_sum_of_parts(whole, single):
                raise TaskError(
                    f"the loss of training_step is {whole / size:g} for {size} samples and on average "
                    f"{sum(single) / size:g} for one of them{''.join(observer.reasons[:1])}: it is no mean "
                    f"over samples. {_REMEDY}"
                )
        if not has_shown:
            raise TaskError(f"the loss of training_step is 0 or NaN in each micro-batch. {_REMEDY}")
        for dataset in parts.eval_datasets.values():
            samples = next(spread_samples(dataset, num_samples), [])
            stepped = step(parts.collate(samples), len(samples), StepKind.VALIDATION)
            # NaN stays, and what MeanMetric calls disabled would leave out the weights too.
            means = {name: MeanMetric(nan_strategy=math.nan) for name in stepped.values}
            parts.metrics = means | getattr(module, LOGGED)


_REMEDY = "Return lanewise.Loss(sum, weight), or Loss.mean(value, weight)."
