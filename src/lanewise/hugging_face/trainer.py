"""Reads a Trainer of transformers, and trains what it holds."""

import math
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import Trainer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lanewise.adapt.optimizer import BuiltOptimizer
from lanewise.adapt.sections import merged, steps_of
from lanewise.commands.jobs.api import TrainResult, load_weights
from lanewise.commands.jobs.api import train as train_task
from lanewise.errors import ConfigError, raised_at_call
from lanewise.hugging_face.arguments import observed, refusals, sections_of
from lanewise.hugging_face.task import TrainerParts, TrainerTask, own_loss
from lanewise.hugging_face.weight import find_weight
from lanewise.processes.world.environment import require_no_world
from lanewise.runs.report.weights import find_weights

if TYPE_CHECKING:
    from lanewise.runs.callback import Callback

_RECORDERS = "transformers.utils.output_capturing"


@raised_at_call
def train(
    trainer: Trainer,
    *,
    num_processes: int = 1,
    callbacks: "Sequence[Callback]" = (),
    resume: bool = False,
    allow: Collection[str] = (),
    overwrite: bool = False,
    **sections: Any,
) -> TrainResult:
    """Train the model of a Trainer of transformers in fresh processes, as its arguments say.

    Afterwards the trainer's model has the trained weights: the best ones where the run keeps them, as it
    does with `load_best_model_at_end`, else the last. The folder `pretrained` of the run has what
    `trainer.save_model` writes.

    Args:
        trainer: as it was built; it has not trained.
        num_processes: how many processes the arguments were chosen for. The global batch, on any number of
            devices, is `per_device_train_batch_size` x `gradient_accumulation_steps` x this.
        callbacks: observe the run on rank 0, in its process.
        resume: see `lanewise.train`.
        allow: see `lanewise.train`.
        overwrite: see `lanewise.train`.
        sections: of the configuration, as `lanewise.train` takes them: what they say takes the place of what
            was read.

    Raises:
        ConfigError: lists all that the trainer asks for and a run does not do; or torchrun started this
            process.
        TaskError: the loss is no mean over the targets of a micro-batch.
        LanewiseError: what the first failing process raised.
    """
    require_no_world("lanewise.hugging_face.train starts its own processes")
    run = read(trainer, num_processes=num_processes, **sections)
    model: Any = trainer.model
    try:
        result = train_task(**run, callbacks=callbacks, resume=resume, allow=allow, overwrite=overwrite)
        load_weights(model, *find_weights(result.run_dir))
    finally:
        model.to(trainer.args.device)
    trainer.save_model(str(result.run_dir / "pretrained"))
    return result


@raised_at_call
def read(trainer: Trainer, *, num_processes: int = 1, **overrides: Any) -> dict[str, Any]:
    """Return what `lanewise.train` and `lanewise.verify` need to train as a Trainer would.

    For the proof: `lanewise.verify(**lanewise.hugging_face.read(trainer), devices=(1, 2, 3))`. The trainer's
    model is on the CPU afterwards.

    Args:
        trainer: see `train`.
        num_processes: see `train`.
        overrides: sections; see `train`.

    Returns:
        The task and the sections, by the names of their arguments.

    Raises:
        ConfigError: see `train`.
        TaskError: see `train`.
    """
    if not isinstance(trainer, Trainer):
        raise ConfigError(f"needs a Trainer of transformers: got a {type(trainer).__name__}.")
    args = trainer.args
    if mistakes := list(refusals(trainer)):
        raise ConfigError(*mistakes)
    loader: Any = trainer.get_train_dataloader()
    sections = merged(sections_of(args, num_processes), overrides)
    num_steps = math.ceil(steps_of(sections, len(loader.dataset))[1])
    if isinstance(sections["train"].get("epochs"), float):
        sections["train"] |= {"epochs": None, "max_steps": num_steps}
    model: Any = trainer.model
    own = trainer.optimizer, trainer.lr_scheduler
    try:
        made = trainer.create_optimizer(), trainer.create_scheduler(num_steps)
        optimizer = BuiltOptimizer(made[0], None if "scheduler" in overrides else made[1], model)
    finally:
        trainer.optimizer, trainer.lr_scheduler = own
    parts = _parts(trainer, loader, optimizer)
    _remove_recorders(model)
    model.cpu()
    sections = merged({**sections, **optimizer.sections, **observed(trainer, num_steps)}, overrides)
    return {"task": TrainerTask(parts), **sections}


def _parts(trainer: Trainer, loader: Any, optimizer: BuiltOptimizer) -> TrainerParts:
    """Read the model, the data and the loss."""
    evaluated: dict[str, Any] = {}
    if trainer.eval_dataset is not None and trainer.args.eval_strategy != "no":
        names = trainer.eval_dataset if isinstance(trainer.eval_dataset, dict) else {None: None}
        evaluated = {name or "eval": trainer.get_eval_dataloader(name).dataset for name in names}
    config = getattr(trainer.model, "config", None)
    loss_function: Callable[..., Any] | None = trainer.compute_loss_func
    if loss_function is None and trainer.label_smoother is not None:
        model: Any = trainer.model
        named = model.get_base_model() if hasattr(model, "get_base_model") else model  # of PEFT
        shifts = type(named).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
        loss_function = partial(_smoothed, partial(trainer.label_smoother, shift_labels=shifts))
    parts = TrainerParts(
        model=trainer.model,
        train_dataset=loader.dataset,
        eval_datasets=evaluated,
        collator=loader.collate_fn,
        optimizer=optimizer,
        loss_function=loss_function,
        takes_count=trainer.model_accepts_loss_kwargs or loss_function is not None,
        counts="samples",
        compute_metrics=None if trainer.args.prediction_loss_only else trainer.compute_metrics,
        preprocess=trainer.preprocess_logits_for_metrics,
        label_names=trainer.label_names,
        ignored_keys=getattr(config, "keys_to_ignore_at_inference", ["past_key_values"]),
    )
    find_weight(parts, trainer.args.per_device_train_batch_size, trainer.args.device)
    return parts


def _smoothed(smoother: Callable[..., Any], outputs: Any, labels: Any, num_items_in_batch: Any) -> Any:
    """Return the smoothed loss; the model's own one without `labels`, as in question answering."""
    if labels is None:
        return own_loss(outputs)
    return smoother(outputs, labels, num_items_in_batch=num_items_in_batch)


def _remove_recorders(model: nn.Module) -> None:
    """Remove the hooks by which the library records hidden states, which no other process could be sent.

    The library adds them again where a forward needs them, if the module does not say that it has them.
    """
    for module in model.modules():
        hooks = module._forward_hooks  # noqa: SLF001 - see tests/architecture/test_private_api.py
        for key in [key for key, hook in hooks.items() if hook.__module__ == _RECORDERS]:
            del hooks[key]
        vars(module).pop("_output_capturing_hooks_installed", None)
