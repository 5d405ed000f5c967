"""Which optimizers and schedulers can be used, with which arguments, and what `exact` asks of them."""

import inspect
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any

from lanewise.config.class_path import ClassConfig, resolve, resolve_class
from lanewise.config.optimizer import OptimizerConfig
from lanewise.config.run import RunConfig
from lanewise.config.scheduler import SchedulerConfig
from lanewise.errors import ConfigError


def refuse_optimizer(cls: type) -> str:
    """Say why a class of optimizers cannot be used, and what to do; nothing where it can."""
    if _is_a(cls, "torch.optim.SparseAdam"):
        return "It takes sparse gradients only, and the sums over lanes are dense. Use torch.optim.Adam."
    return ""


def check_optimizer(config: RunConfig, devices: Sequence[str]) -> None:
    """Check what depends on more than one section; the classes were checked before.

    Args:
        config: the run.
        devices: the kinds of devices that the model is trained on.

    Raises:
        ConfigError: lists every mistake.
    """
    options = config.optimizer.init_args
    distributed = config.distributed
    mistakes: list[str] = []
    if options.get("differentiable"):
        mistakes.append(
            "optimizer.init_args.differentiable cannot be used: training takes no gradient of an update. "
            "Remove the key."
        )
    if options.get("capturable") and "cpu" in devices:
        mistakes.append("optimizer.init_args.capturable needs a GPU: got the device cpu. Remove the key.")
    if options.get("fused") and distributed.kind.shards_weights and distributed.equality == "exact":
        mistakes.append(
            "optimizer.init_args.fused cannot be exact with distributed.reducer fsdp: got true. "
            "torch's fused SGD, for one, rounds the last elements of a tensor differently, and those of a "
            "shard are others. Leave fused out, or use distributed.equality=close."
        )
    mistakes += closure_mistakes(config, resolve("optimizer", config.optimizer.of_class))
    scheduler = config.scheduler
    if scheduler is not None and follows_evaluation(scheduler) and config.evaluate.best is None:
        mistakes.append(
            f"scheduler.class_path: {scheduler.class_path} follows the value of evaluate.best, which is "
            "unset. Set it, for example to held_out/loss, or to train/loss_epoch."
        )
    if mistakes:
        raise ConfigError(*mistakes)


def needs_closure(optimizer_class: Any, *, is_asked: bool) -> bool:
    """Tell whether an optimizer asks for the gradient by itself, as LBFGS does.

    Args:
        optimizer_class: of the optimizer; of a function that returns one it is not known yet.
        is_asked: whether the configuration says so, by `optimizer.closure`.
    """
    step = getattr(optimizer_class, "step", None)
    closure = None if step is None else inspect.signature(step).parameters.get("closure")
    return is_asked or (closure is not None and closure.default is closure.empty)


def closure_mistakes(config: RunConfig, optimizer_class: Any) -> Iterator[str]:
    """Yield what an optimizer with a closure, which needs the whole gradient, cannot be combined with."""
    name = config.optimizer.class_path
    if not needs_closure(optimizer_class, is_asked=config.optimizer.closure):
        return
    if config.distributed.kind.shards_weights:
        yield (
            f"optimizer.class_path: {name} looks at the whole gradient, and distributed.reducer fsdp gives "
            "each process a part of it. Use distributed.reducer=ddp."
        )
    if config.distributed.shard_optimizer:
        yield (
            f"optimizer.class_path: {name} looks at the whole gradient, and distributed.shard_optimizer lets "
            "each process update some of the parameters. Leave shard_optimizer out."
        )
    if config.precision == "fp16":
        yield (
            f"optimizer.class_path: {name} asks for the gradient several times in a step, none of which can "
            "be skipped where fp16 overflows. Use precision=bf16 or float32."
        )


def follows_evaluation(scheduler: SchedulerConfig) -> bool:
    """Tell whether a scheduler is stepped by what an evaluation gave, instead of after each step."""
    section, plateau = scheduler.of_class, "torch.optim.lr_scheduler.ReduceLROnPlateau"
    if section is None:
        return False
    found = resolve("scheduler", section)
    return isinstance(found, type) and _is_a(found, plateau)


def choose_implementation(
    config: RunConfig, device_types: AbstractSet[str], *, are_floats: bool
) -> OptimizerConfig:
    """Return the optimizer's section, on an accelerator with the implementation that suits the grade.

    In `close` on CUDA that is the fused one, the fastest. In `exact` it is the one that every reducer can
    have: by default torch updates plain parameters with other kernels than sharded ones.

    Args:
        config: of the run.
        device_types: of the parameters.
        are_floats: whether all parameters are real; fused optimizers take no others.
    """
    section = config.optimizer
    if "cpu" in device_types or {"foreach", "fused"} & section.init_args.keys():
        return section
    chosen = "foreach" if config.distributed.equality == "exact" else "fused"
    if chosen == "fused" and not (device_types == {"cuda"} and are_floats):
        return section
    if chosen not in inspect.signature(resolve("optimizer", section.of_class)).parameters:
        return section
    return replace(section, init_args={**section.init_args, chosen: True})


def _is_a(cls: type, class_path: str) -> bool:
    return issubclass(cls, resolve_class(class_path, ClassConfig(class_path=class_path)))
