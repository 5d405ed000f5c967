"""What the arguments of a Trainer become in a configuration, and which of them a run does not take over."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch
from transformers import EarlyStoppingCallback, Trainer, TrainingArguments

from lanewise.adapt.overridden import overridden
from lanewise.config.better import mode_by_name
from lanewise.hugging_face.task import METRICS

_READ = """
    output_dir per_device_train_batch_size gradient_accumulation_steps num_train_epochs max_steps
    learning_rate lr_scheduler_type lr_scheduler_kwargs
    warmup_steps optim optim_args weight_decay adam_beta1
    adam_beta2 adam_epsilon max_grad_norm label_smoothing_factor bf16 fp16 tf32 logging_strategy logging_steps
    eval_strategy eval_steps save_strategy save_steps save_total_limit load_best_model_at_end
    metric_for_best_model greater_is_better seed use_cpu dataloader_drop_last dataloader_num_workers
    remove_unused_columns label_names use_cache prediction_loss_only
"""
"""Arguments that become a part of the run."""
_WITHOUT_EFFECT = """
    per_device_eval_batch_size logging_first_step log_on_each_node logging_nan_inf_filter log_level
    log_level_replica disable_tqdm run_name project save_only_model save_on_each_node eval_accumulation_steps
    eval_use_gather_object torch_empty_cache_steps dataloader_pin_memory dataloader_persistent_workers
    dataloader_prefetch_factor dataloader_in_order ddp_find_unused_parameters ddp_bucket_cap_mb
    ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout skip_memory_metrics do_train do_eval
    do_predict ignore_data_skip local_rank length_column_name
"""
"""Arguments that change no weight of the model."""
_INSTEAD = {
    "activation_checkpointing": 'memory={"activation_checkpointing": "auto"}',
    "gradient_checkpointing": 'memory={"activation_checkpointing": "auto"}',
    "torch_compile": 'compile="auto"',
    "fsdp": 'distributed={"reducer": "fsdp"}',
    "deepspeed": 'distributed={"reducer": "fsdp"} or {"shard_optimizer": True}',
    "report_to": "callbacks=[...], with a tracker of lanewise.trackers",
    "resume_from_checkpoint": "resume=True",
    "auto_find_batch_size": "the number that `lanewise plan --largest-micro-batch` finds",
    "predict_with_generate": "a Task with eval_forward",
    "train_sampling_strategy": 'a Task with sample_lengths, for data={"order": "bucketed"}',
}
"""What `train` takes in place of an argument that it refuses."""
_MODULES_OF_CALLBACKS = ("transformers.trainer_callback", "transformers.utils.notebook")
"""Of the library's own callbacks; the second is in each Trainer of a notebook."""
_MAY_OVERRIDE = (
    *("create_optimizer", "create_scheduler", "get_decay_parameter_names", "get_optimizer_cls_and_kwargs"),
    *("save_model", "push_to_hub", "create_model_card"),
)


def refusals(trainer: Trainer) -> Iterator[str]:
    """Yield what a trainer asks for and a run does not do."""
    args = trainer.args
    base = next(cls for cls in type(trainer).__mro__ if cls.__module__.startswith("transformers."))
    if own := overridden(trainer, base, _MAY_OVERRIDE):
        yield f"{type(trainer).__name__} overrides {', '.join(own)}, which nothing here calls. Write a Task."
    for callback in trainer.callback_handler.callbacks:
        if type(callback).__module__ not in _MODULES_OF_CALLBACKS:
            yield (
                f"the callback {type(callback).__name__} is not called, and may change the training. "
                "Remove it, or give callbacks=[...] with a lanewise.Callback that does the same."
            )
    if getattr(trainer.data_collator, "seed", None) is not None:
        yield (
            "the data_collator has a seed, and so random numbers of its own, which depend on the process. "
            "Leave it out: what a collator draws is seeded for each lane."
        )
    known = {*_READ.split(), *_WITHOUT_EFFECT.split()}
    for field in dataclasses.fields(args):
        value = getattr(args, field.name)
        is_order = field.name == "train_sampling_strategy" and value == "sequential"
        if field.name in known or is_order or _is_default(value, field):
            continue
        instead = _INSTEAD.get(field.name)
        hint = f", and give {instead}" if instead else ", or write a Task"
        name = f"{type(args).__name__}.{field.name}"
        yield f"{name} is {value!r:.60}, which a run does not do. Leave it out{hint}."
    sets = trainer.eval_dataset if isinstance(trainer.eval_dataset, dict) else {"": trainer.eval_dataset}
    for name, dataset in {"train_dataset": trainer.train_dataset, **sets}.items():
        is_stream = isinstance(dataset, torch.utils.data.IterableDataset) or not hasattr(dataset, "__len__")
        if is_stream and (dataset is not None or name == "train_dataset"):
            yield (
                f"the {name or 'eval_dataset'} is a {type(dataset).__name__}, which has no length. Give a "
                "dataset with an index, or write a Task, which takes streams."
            )


def _is_default(value: Any, field: "dataclasses.Field[Any]") -> bool:
    default = None if field.default is dataclasses.MISSING else field.default
    if dataclasses.is_dataclass(value) and default is None:
        return bool(value == type(value)())  # type: ignore[misc]  # a dataclass without required fields
    is_nothing = value is None or value is False or value in ("", [])
    return bool(value == default or (is_nothing and default in (None, False, "", "none")))


def sections_of(args: TrainingArguments, num_processes: int) -> dict[str, Any]:
    """Return the sections on which the length of a run depends.

    Args:
        args: of the trainer.
        num_processes: how many processes they were chosen for.
    """
    size = args.per_device_train_batch_size
    global_size = size * args.gradient_accumulation_steps * num_processes
    data: dict[str, Any] = {
        "num_workers": args.dataloader_num_workers,
        "drop_last": args.dataloader_drop_last,
    }
    if args.train_sampling_strategy == "sequential":
        data["order"] = "sequential"
    epochs = args.num_train_epochs
    ends: dict[str, Any] = {"epochs": int(epochs) if epochs == int(epochs) else epochs}
    if args.max_steps > 0:
        ends = {"max_steps": args.max_steps}
    clips = {"max_grad_norm": args.max_grad_norm} if args.max_grad_norm else {}
    return {
        "batch": {"global_batch_size": global_size, "micro_batch_size": size},
        "train": {"run_dir": args.output_dir, "seed": args.seed, **clips, **ends},
        "data": data,
        "precision": next((name for name in ("bf16", "fp16", "tf32") if getattr(args, name)), "float32"),
        "distributed": {"device_type": "cpu"} if args.use_cpu else {},
    }


def observed(trainer: Trainer, num_steps: int) -> dict[str, Any]:
    """Return the sections that say how often the run is logged, evaluated and saved.

    Args:
        trainer: has the arguments, and perhaps the callback that stops early.
        num_steps: of the run.
    """
    args: Any = trainer.args

    def steps(value: float) -> int:
        return math.ceil(value * num_steps) if value < 1 else int(value)

    evaluate: dict[str, Any] = {}
    if args.eval_strategy == "steps":
        evaluate["every_steps"] = steps(args.eval_steps)
    callbacks = trainer.callback_handler.callbacks
    stopping = [callback for callback in callbacks if isinstance(callback, EarlyStoppingCallback)]
    if args.load_best_model_at_end or args.save_strategy == "best" or stopping:
        name = _metric_name(trainer)
        # Where greater_is_better is unset, transformers sets it to whether the name does not end in loss.
        falls = not args.greater_is_better or (not name.endswith("loss") and mode_by_name(name) == "min")
        best = {"metric": name, "mode": "min" if falls else "max"}
        evaluate |= {"best": best["metric"], "best_mode": best["mode"]}
        for callback in stopping:
            least = callback.early_stopping_threshold or 0.0
            patience = {"patience": callback.early_stopping_patience, "min_delta": least}
            evaluate["early_stopping"] = {**best, **patience}
    checkpoint: dict[str, Any] = {}
    if args.save_strategy in ("steps", "epoch"):
        every = {"epochs": 1} if args.save_strategy == "epoch" else {"steps": steps(args.save_steps)}
        checkpoint["every"] = every
    if args.save_total_limit:
        checkpoint["keep_last"] = args.save_total_limit
    log = {"every_steps": steps(args.logging_steps)} if args.logging_strategy == "steps" else {}
    return {"log": log, "evaluate": evaluate, "checkpoint": checkpoint}


def _metric_name(trainer: Trainer) -> str:
    """Return what a run calls `metric_for_best_model`."""
    name = (trainer.args.metric_for_best_model or "loss").removeprefix("eval_")
    sets = trainer.eval_dataset if isinstance(trainer.eval_dataset, dict) else {}
    of_set = max((key for key in sets if name.startswith(f"{key}_")), key=len, default=None)
    metric = name.removeprefix(f"{of_set}_") if of_set else name
    return f"{of_set or 'eval'}/{metric if metric == 'loss' else f'{METRICS}/{metric}'}"
