"""Notes what the updates of a program saw and did: gradients, weights, and what its loaders read."""

from __future__ import annotations

import gc
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial, wraps
from pathlib import Path
from typing import Any, final

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import IterableDataset

from .reading import LoaderPass, counts_of, digest, random_states, rows_of

REFUSED_MODULES = {
    "FullyShardedDataParallel": "FSDP",
    "DeepSpeedEngine": "DeepSpeed",
    "DataParallel": "DataParallel in one process",
}
WRAPPERS = re.compile(r"^(module\.|_orig_mod\.|_forward_module\.)*")
"""What wrappers put before the names of parameters."""
SECONDS_BETWEEN_CHECKS = 0.05
MOST_WATCHED = 8
"""Parameters that are watched for an update by hand."""


def on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in float32."""
    tensor = tensor.detach()
    dense = tensor.to_dense() if tensor.is_sparse else tensor
    return dense.to("cpu", torch.float32, copy=True)


def states_of(module: torch.nn.Module) -> str:
    """Return a hash of the states of all generators that a module may draw from."""
    device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    on_device = None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)
    return digest([random_states(), on_device])


@final
class Observer:
    """Notes what one process does, and writes it to a file when it has seen enough.

    Args:
        job: the `folder` to write to; `num_updates`, of which gradients are kept; `until` what to observe
            (updates, epoch, evaluation); and `replay`, a file with what other processes read, where this
            one shall read the same.
    """

    def __init__(self, job: Mapping[str, Any]) -> None:
        self.folder, self.until, self.num_updates = Path(job["folder"]), job["until"], job["num_updates"]
        self.rank = int(os.environ.get("RANK", "0"))
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.replay: dict[str, Any] = torch.load(job["replay"], weights_only=True) if job["replay"] else {}
        self.updates: list[dict[str, Any]] = []
        self.passes: list[LoaderPass] = []
        self.notes: set[str] = set()
        self.refused: set[str] = set()
        self._optimizers: list[Optimizer] = []
        self._names: dict[int, str] = {}
        self._hooked: set[int] = set()
        self._clipped: dict[int, torch.Tensor] = {}
        """Gradients before they were clipped, by parameter."""
        self._own: dict[int, torch.Tensor] = {}
        """This rank's own gradients, before they were reduced, by parameter."""
        self._num_backwards = 0
        self._rows: dict[int, list[str]] = {0: [], 1: []}
        """What entered the outermost module since the last update: its rows and its columns."""
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Some parameters as they were at the first backward, until an optimizer is seen to update any."""
        self.is_in_backward = False
        self._current: LoaderPass | None = None
        """The pass that gave out the last batch."""
        self._depth = 0
        self._states = ""
        self._pid = os.getpid()
        self._is_written = False

    # ---------------------------------------------------------------------------------------- gradients

    @property
    def keeps_gradients(self) -> bool:
        """Whether the next update is one whose gradient is kept."""
        return not self._is_written and len(self.updates) < self.num_updates

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Remember an optimizer; they are numbered in the order in which they are made."""
        if not any(optimizer is known for known in self._optimizers):
            self._optimizers.append(optimizer)
        if "ZeroRedundancyOptimizer" in [base.__name__ for base in type(optimizer).__mro__]:
            self.refuse("ZeroRedundancyOptimizer, which shards an optimizer")

    def parameters_of(self, optimizer: Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the parameters of an optimizer, each with its place, which no wrapper changes."""
        number = next(number for number, known in enumerate(self._optimizers) if known is optimizer)
        for group_number, group in enumerate(optimizer.param_groups):
            for place, parameter in enumerate(group["params"]):
                yield f"{number}.{group_number}.{place}", parameter

    def before_backward(self) -> None:
        """Hook the parameters that have no hook yet; it sees a gradient before DDP reduces it."""
        self._num_backwards += 1
        if self._current is not None:
            self._current.is_training = True
        if not self.updates and any(not now.equal(before) for now, before in self._before):
            self.refuse(
                "an update of its weights by hand, such as p.data.add_, in place of an optimizer of torch"
            )
        for optimizer in self._optimizers if self.keeps_gradients else ():
            for _, parameter in self.parameters_of(optimizer):
                if type(parameter).__name__ in ("DTensor", "FlatParameter"):
                    self.refuse("sharded parameters, as FSDP has")
                if parameter.requires_grad and id(parameter) not in self._hooked:
                    self._hooked.add(id(parameter))
                    parameter.register_hook(partial(self.add_own, parameter))

    def note_collective(self) -> None:
        """Note that processes talk between a backward and an update."""
        if self._num_backwards and not self.is_in_backward:
            self.notes.add("joined")

    def add_own(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Add to this rank's own gradient of a parameter; begin anew where the program has zeroed it."""
        if not self.keeps_gradients:
            return
        self._clipped.pop(id(parameter), None)  # of an update that was skipped, or before its last backward
        is_first = parameter.grad is None or not parameter.grad.any()
        if is_first or id(parameter) not in self._own:
            self._own[id(parameter)] = on_cpu(gradient)
        else:
            self._own[id(parameter)] += on_cpu(gradient)

    def before_clipping(self, parameters: list[torch.Tensor]) -> None:
        """Keep gradients that are about to be clipped."""
        for parameter in parameters:
            if parameter.grad is not None and self.keeps_gradients:
                self._clipped.setdefault(id(parameter), on_cpu(parameter.grad))

    def before_step(self, optimizer: Optimizer, arguments: Any, options: Any) -> Any:
        """Note the gradient; where the optimizer computes it in a closure, after the first call."""
        self.add_optimizer(optimizer)  # a copy was not seen when it was made
        if self.is_in_backward:
            self.refuse("an optimizer that updates within the backward")
        closure = arguments[1] if len(arguments) > 1 else options.get("closure")
        if closure is None:
            self.note_update(optimizer)
            return None
        number = len(self.updates)

        @wraps(closure)
        def observed() -> Any:
            loss = closure()
            if len(self.updates) == number:
                self.note_update(optimizer)
            return loss

        if len(arguments) > 1:
            return (arguments[0], observed, *arguments[2:]), options
        return arguments, {**options, "closure": observed}

    def note_update(self, optimizer: Optimizer) -> None:
        """Note what an optimizer is about to do."""
        update: dict[str, Any] = {
            "rates": [float(group["lr"]) for group in optimizer.param_groups if "lr" in group],
            "num_backwards": self._num_backwards,
        }
        if self.keeps_gradients:
            named = list(self.parameters_of(optimizer))
            found = {place: self._clipped.get(id(held), held.grad) for place, held in named}
            update["gradients"] = {place: on_cpu(held) for place, held in found.items() if held is not None}
            update["own"] = {place: self._own[id(held)] for place, held in named if id(held) in self._own}
            own, kinds = update["own"], {type(held) for held in gc.get_objects()}
            is_own = all(
                place in own and held.equal(own[place]) for place, held in update["gradients"].items()
            )
            if not is_own or any(issubclass(kind, DistributedDataParallel) for kind in kinds):
                self.notes.add("joined")
            update["weights"] = {place: digest(on_cpu(held)) for place, held in named}
            update["names"] = {
                place: self._names[id(held)] for place, held in named if id(held) in self._names
            }
            update["rows"], self._rows = self._rows, {0: [], 1: []}
        self._num_backwards, self._before = 0, []
        self.updates.append(update)

    def after_step(self, optimizer: Optimizer, arguments: Any, options: Any) -> None:
        """Note the weights; give this process those of the others, where it reads what they read."""
        if not self.updates or self._is_written:
            return
        update = self.updates[-1]
        if "gradients" in update:
            named = list(self.parameters_of(optimizer))
            for _, parameter in named:
                self._clipped.pop(id(parameter), None)
                self._own.pop(id(parameter), None)
            others = self.replay.get("weights", [])[len(self.updates) - 1 :]
            for place, parameter in named if others else ():
                if place in others[0]:
                    with torch.no_grad():
                        parameter.copy_(others[0][place].view_as(parameter))
            if self.rank == 0 and not self.replay:
                update["updated"] = {place: on_cpu(parameter) for place, parameter in named}
        num_epochs = sum(held.is_training for held in self.passes)
        is_seen = self.until == "updates" or (self.until == "epoch" and num_epochs > 1)
        if is_seen and not self.keeps_gradients:
            self.finish()

    # ------------------------------------------------------------------------------------------ modules

    def before_forward(self, module: torch.nn.Module, inputs: Any) -> None:
        """Still a module; of the outermost note parameters, what enters, and the state of random numbers."""
        if isinstance(module, torch.nn.RNNBase) and module.dropout:
            module.dropout = 0.0
            self.notes.add("dropout")
        if isinstance(module, torch.nn.SyncBatchNorm) and module.training and module.track_running_stats:
            module.eval()  # as in one process, where it is torch's function that is stilled
            self.notes.add("batch normalization")
        if torch.is_autocast_enabled() or torch.is_autocast_enabled("cpu"):
            self.notes.add("half precision")
        self._depth += 1
        if self._depth > 1 or not self.keeps_gradients:
            return
        if type(module).__name__ in REFUSED_MODULES:
            self.refuse(REFUSED_MODULES[type(module).__name__])
        for name, parameter in module.named_parameters():
            self._names.setdefault(id(parameter), WRAPPERS.sub("", name))
            if parameter.dtype in (torch.float16, torch.bfloat16):
                self.notes.add("half precision")
        self._states = states_of(module) if module.training else ""
        if module.training and torch.is_grad_enabled() and not any(held.is_training for held in self.passes):
            for dimension in self._rows:
                self._rows[dimension] += rows_of(inputs, dimension)
            if not self.updates and not self._before:
                trained = [held for held in module.parameters() if held.requires_grad]
                self._before = [(held, held.detach().clone()) for held in trained[-MOST_WATCHED:]]

    def after_forward(self, module: torch.nn.Module, _: Any, __: Any) -> None:
        """Note whether the outermost module drew random numbers, though dropout is off."""
        self._depth -= 1
        if not self._depth and self._states and states_of(module) != self._states:
            self.notes.add("draws")
        if not self._depth:
            self._states = ""

    # ---------------------------------------------------------------------------------------- samples

    def begin_pass(self, iterator: Any, loader: Any) -> None:
        """Note that a loader is iterated over."""
        if getattr(iterator, "lanewise_pass", None) is not None and not iterator.lanewise_pass.indices:
            return  # which is told of its first pass twice, where other processes read for the loader
        is_stream = loader.batch_sampler is None or isinstance(loader.dataset, IterableDataset)
        num_batches = 0
        if not is_stream:
            with suppress(TypeError):  # of a sampler without a length
                num_batches = len(loader)
        ended = [held for held in self.passes if held.is_ended and not held.is_training and held.num_taken]
        iterator.lanewise_pass = LoaderPass(loader.dataset, is_stream, len(self.updates), num_batches)
        sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
        iterator.lanewise_pass.reshuffles = hasattr(sampler, "set_epoch") and getattr(
            sampler, "shuffle", True
        )
        self.passes.append(iterator.lanewise_pass)
        if self.until == "evaluation" and any(held.first_update for held in ended):
            self.finish()

    def next_index(self, held: LoaderPass, following: Callable[[], Any]) -> Any:
        """Return what to read next: what the sampler says, or what the other processes read."""
        number = next(number for number, known in enumerate(self.passes) if known is held)
        batches = self.replay.get("passes", {}).get(number)
        if batches is None or held.is_stream:
            index = following()
        else:
            if len(held.indices) == len(batches):
                raise StopIteration
            index = self.places_in(held, batches[len(held.indices)])
        held.indices.append(index)
        return index

    def places_in(self, held: LoaderPass, samples: list[Any]) -> list[Any]:
        """Return the indices of samples in the dataset of a pass."""
        places = held.places(is_by_content=self.replay["is_by_content"])
        missing = [sample for sample in samples if sample not in places]
        if missing:
            self.refuse("samples that other processes read and the dataset of one process does not have")
        return [places[sample] for sample in samples if sample in places]

    def take(self, held: LoaderPass, batch: Any) -> None:
        """Note that a batch was given out."""
        held.num_taken += 1
        held.is_ended = held.num_taken == held.num_batches  # who knows the length does not ask for more
        self._current = held
        if self.keeps_gradients:
            held.counts.append(counts_of(batch))

    def end_pass(self, held: LoaderPass) -> None:
        """Note that a loader has no more batches."""
        held.is_ended = True
        if not held.is_training:  # what it interrupted goes on, maybe with a batch that was read before
            going_on = (other for other in self.passes if other.is_training and not other.is_ended)
            self._current = next(going_on, held)
        if self.until == "evaluation" and held.num_taken and not held.is_training and self.updates:
            self.finish()

    # ------------------------------------------------------------------------------------------- the end

    def refuse(self, what: str) -> None:
        """Give up: what the program uses cannot be observed."""
        self.refused.add(what)
        self.finish()

    def finish(self, *, is_complete: bool = True) -> None:
        """Write what was noted; unless the program ends by itself, it ends when all ranks have written."""
        if self._is_written or os.getpid() != self._pid or not (self._optimizers or self.refused):
            return
        self._is_written = True
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            self.notes.add("group")
        noted = {
            "updates": self.updates,
            "passes": [held.note() for held in self.passes],
            "notes": sorted(self.notes),
            "refused": sorted(self.refused),
            "is_complete": is_complete,
        }
        file = self.folder / f"{self.rank}.pt"
        torch.save(noted, file.with_suffix(".tmp"))
        file.with_suffix(".tmp").rename(file)
        if is_complete:  # else this process ends by itself, with an exit code of its own
            threading.Thread(target=self.exit_with_others, daemon=True).start()

    def exit_with_others(self) -> None:
        """Wait until all ranks have written, and end this process."""
        files = [self.folder / f"{rank}.pt" for rank in range(self.world_size)]
        while not all(file.exists() for file in files):
            time.sleep(SECONDS_BETWEEN_CHECKS)
        os._exit(0)
