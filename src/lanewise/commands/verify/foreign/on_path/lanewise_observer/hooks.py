"""Puts everything in place that an observer is told by, and stills what draws.

Dropout is off, and batch normalization uses its running statistics, so that processes can be compared.
"""

from __future__ import annotations

import atexit
import random
import sys
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import dataloader

from .observer import Observer
from .reading import SEED, Collate, SameDraws

CLIPPING = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_")
COLLECTIVES = (
    "all_reduce",
    "reduce",
    "all_gather",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "broadcast",
)
DROPOUT = ("dropout", "alpha_dropout", "feature_alpha_dropout", "dropout1d", "dropout2d", "dropout3d")
ARGUMENTS_OF_DROPOUT = ("input", "p", "training")
ARGUMENTS_OF_BATCH_NORM = (
    *("input", "running_mean", "running_var"),
    *("weight", "bias", "training", "momentum", "eps"),
)


def observe(job: Mapping[str, Any]) -> None:
    """Put everything in place that an observer is told by; torch has just been imported."""
    observer = Observer(job)
    torch.manual_seed(SEED + observer.rank)  # for a program that seeds nothing
    random.seed(SEED + observer.rank)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(SEED + observer.rank)
    atexit.register(observer.finish, is_complete=False)
    register_optimizer_step_pre_hook(observer.before_step)
    register_optimizer_step_post_hook(observer.after_step)
    register_module_forward_pre_hook(observer.before_forward)
    register_module_forward_hook(observer.after_forward, always_call=True)
    observe_calls(observer)
    observe_loaders(observer)
    still_layers(observer)


def observe_calls(observer: Observer) -> None:
    """Observe optimizers that are made, backwards, and the clipping of gradients."""
    add_param_group, backward = Optimizer.add_param_group, torch.autograd.backward

    @wraps(add_param_group)
    def adding(optimizer: Optimizer, group: Any) -> None:
        add_param_group(optimizer, group)
        observer.add_optimizer(optimizer)

    @wraps(backward)
    def observed_backward(*arguments: Any, **options: Any) -> None:
        if observer.is_in_backward:  # of a checkpoint, which computes its part again
            backward(*arguments, **options)
            return
        observer.before_backward()
        observer.is_in_backward = True
        try:
            backward(*arguments, **options)
        finally:
            observer.is_in_backward = False

    def clipping(clip: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(clip)
        def observed(parameters: Any, *arguments: Any, **options: Any) -> Any:
            held = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            observer.before_clipping(held)
            return clip(held, *arguments, **options)

        return observed

    def noting(collective: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(collective)
        def observed(*arguments: Any, **options: Any) -> Any:
            observer.note_collective()
            return collective(*arguments, **options)

        return observed

    for name in COLLECTIVES if torch.distributed.is_available() else ():
        setattr(torch.distributed, name, noting(getattr(torch.distributed, name)))
    optimizers: Any = Optimizer
    optimizers.add_param_group = adding
    torch.autograd.backward = observed_backward
    for name in CLIPPING:
        if hasattr(torch.nn.utils, name):
            observed = clipping(getattr(torch.nn.utils, name))
            setattr(torch.nn.utils, name, observed)
            setattr(torch.nn.utils.clip_grad, name, observed)


def observe_loaders(observer: Observer) -> None:
    """Observe what loaders read, whether in this process or in processes of theirs."""
    iterator: Any = dataloader._BaseDataLoaderIter
    begin, reset, following, give = (
        iterator.__init__,
        iterator._reset,
        iterator._next_index,
        iterator.__next__,
    )
    num_parts = observer.replay.get("world_size", 1)
    unmatched = observer.folder / "unmatched"

    def observed_begin(self: Any, loader: Any) -> None:
        begin(self, loader)
        observer.begin_pass(self, loader)
        if not self.lanewise_pass.is_stream:
            self._dataset = SameDraws(self._dataset)
            self._collate_fn = Collate(self._collate_fn, num_parts, unmatched)

    def observed_reset(self: Any, loader: Any, *arguments: Any, **options: Any) -> None:
        reset(self, loader, *arguments, **options)
        observer.begin_pass(self, loader)

    def observed_following(self: Any) -> Any:
        return observer.next_index(self.lanewise_pass, lambda: following(self))

    def observed_give(self: Any) -> Any:
        held = self.lanewise_pass
        try:
            batch = give(self)
        except StopIteration:
            observer.end_pass(held)
            raise
        observer.take(held, batch)
        return batch

    iterator.__init__ = observed_begin
    iterator._reset = observed_reset
    iterator._next_index = observed_following
    iterator.__next__ = observed_give


def still_layers(observer: Observer) -> None:
    """Switch dropout off, and let batch normalization use its running statistics."""
    functional: Any = torch.nn.functional
    normalize, attend = functional.batch_norm, functional.scaled_dot_product_attention

    def without_dropout(*arguments: Any, **options: Any) -> Any:
        options |= dict(zip(ARGUMENTS_OF_DROPOUT, arguments, strict=False))
        if options.get("p", 0.5) and options.get("training", True):
            observer.notes.add("dropout")
        return options["input"]

    def observed_normalize(*arguments: Any, **options: Any) -> Any:
        options |= dict(zip(ARGUMENTS_OF_BATCH_NORM, arguments, strict=False))
        if options.get("training") and options["running_mean"] is not None:
            observer.notes.add("batch normalization")
            options["training"] = False
        return normalize(**options)

    def observed_attend(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        *rest: Any,
        **options: Any,
    ) -> Any:
        if dropout_p:
            observer.notes.add("dropout")
        return attend(query, key, value, attn_mask, 0.0, *rest, **options)

    for name in DROPOUT:
        setattr(functional, name, without_dropout)
    functional.batch_norm = observed_normalize
    functional.scaled_dot_product_attention = observed_attend
