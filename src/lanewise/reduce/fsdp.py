"""Shards parameters, gradients and the optimizer's state over the processes, through torch's FSDP2.

[Note: equal forwards]
A process gathers the weights of a block when its forward or backward reaches the block. This is a collective,
so all processes must run equally many forwards. A process with fewer lanes in a step runs its first batch
again for each missing lane; a process without any lane has read the samples of lane 0 for it. The results of
these forwards are discarded. Every lane's backward must also reach every block that its forward ran, even if
the lane contributes nothing: `connect` makes the outputs of the blocks inputs of the lane's loss. In a
backward that contributes nothing, the gradients of the parameters are discarded, since they could be NaN,
and FSDP sends zeros.
"""

import logging
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from lanewise.config import Equality, FSDPConfig
from lanewise.data import LaneBatch
from lanewise.errors import ConfigError, TaskError
from lanewise.lanes import LaneTurn, Placement
from lanewise.processes.device.accelerator import move
from lanewise.processes.device.nested import copied, tensors_in
from lanewise.processes.world.shards import is_sharded, whole
from lanewise.processes.world.world import World
from lanewise.reduce.all_reduce import open_all_reduce
from lanewise.reduce.blocks import find_blocks, require_no_batch_norm
from lanewise.reduce.caller import Caller
from lanewise.reduce.equal_forwards import connect, equal_forwards, require_data
from lanewise.reduce.fsdp_group import gather_before_backward, kept_whole, reshard, send_zeros_for_unused
from lanewise.reduce.reducer import (
    Lane,
    LaneWork,
    Reducer,
    T,
    divide_gradients,
    run_backward,
    trained_parameters,
)
from lanewise.reduce.tree_reduce_scatter import TreeReduceScatter

logger = logging.getLogger(__name__)


@final
class FSDPReducer(Reducer):
    """A reducer with which every process has a part of each parameter, gradient and optimizer state.

    A block's weights are gathered for its forward and again for its backward. Parameters in no block stay
    gathered from the beginning of the forward to the end of the backward. See [Note: equal forwards].

    Collective: every rank must construct it, and run every step.

    Args:
        model: the user's module, on the CPU; equal on all ranks. Its parameters become sharded ones.
        placement: which process carries which lanes.
        world: the processes; more than one.
        config: which modules are blocks, and how their weights are stored.
        equality: `exact` adds in the tree, through `TreeReduceScatter`.
        on_backward: called after each lane's backward, which includes the reduction.
    """

    def __init__(
        self,
        model: nn.Module,
        placement: Placement,
        world: World,
        config: FSDPConfig,
        equality: Equality,
        *,
        on_backward: Callable[[], None],
    ) -> None:
        if world.device.type != "cpu" and dist.get_backend() == "gloo":
            needed = dist.get_default_backend_for_device(world.device)
            raise ConfigError(
                f"distributed.reducer fsdp on GPUs needs distributed.backend {needed}: got gloo. "
                "Give each process a GPU of its own, or use distributed.reducer=ddp."
            )
        if world.device.type == "cpu" and config.cpu_offload:
            raise ConfigError(
                "distributed.fsdp.cpu_offload needs GPUs: got true on the CPU, where everything is in host "
                "memory. Leave it out."
            )
        if config.param_dtype != "float32":
            require_no_batch_norm(model, config.param_dtype)
        self.forward_is_collective = True
        self._world = world
        self._config = config
        self._mesh: Any = None
        self._hooks: list[RemovableHandle] = []
        self._is_in_forward = False
        self._ran: set[nn.Module] = set()
        self._order: list[str] = []
        self._names = {module: name for name, module in model.named_modules()}
        self._outputs: list[torch.Tensor] = []
        self._contributes = True
        self._gathered: dict[torch.Tensor, str] = {}
        self._notes: OrderedDict[int, Callable[[str, torch.Tensor], None]] = OrderedDict()
        self._callers: dict[nn.Module, Any] = {}
        self._placement = placement
        self.adopt(model)
        self.model, self.replicas = model, [model]
        self.parameters = trained_parameters(model)  # sharded by `adopt`
        self._sums: list[TreeReduceScatter] = []
        self._is_exact, self._num_processes = equality == "exact", world.world_size
        self._open_all_reduce = partial(open_all_reduce, world, placement, equality)
        for module in self._sharded(model):
            self._hook_gathered(module)
            if equality == "exact":
                self._sums.append(TreeReduceScatter(placement))
                module.set_custom_reduce_scatter(self._sums[-1])
        self._on_backward = on_backward
        if world.rank == 0:
            self._describe_blocks(model)

    def adopt(self, module: nn.Module) -> None:
        from torch.distributed import device_mesh, fsdp  # noqa: PLC0415 - takes a second

        self._mesh = self._mesh or device_mesh.init_device_mesh(
            self._world.device.type, (self._world.world_size,)
        )
        policies: dict[str, Any] = {"mesh": self._mesh}
        if self._config.param_dtype == "bf16":
            # The inputs stay as the task made them: autocast casts them for each operation.
            policies["mp_policy"] = fsdp.MixedPrecisionPolicy(
                torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
            )
        if self._config.cpu_offload:
            policies["offload_policy"] = fsdp.CPUOffloadPolicy()
        for block in find_blocks(module, self._config.blocks):
            fsdp.fully_shard(block, **policies)
            self._hooks.append(block.register_forward_hook(self._note_outputs))
        self._callers[module] = fsdp.fully_shard(Caller(module), **policies)
        for sharded in self._sharded(module):
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
            send_zeros_for_unused(sharded)

    def gathered_parameters(self) -> Mapping[torch.Tensor, str]:
        return self._gathered

    def register_hooks(self, note: Callable[[str, torch.Tensor], None]) -> list[RemovableHandle]:
        """Autograd sees the gathered parameters."""
        handle = RemovableHandle(self._notes)
        self._notes[handle.id] = note
        return [handle]

    def rounds(self, batches: Iterator[LaneBatch]) -> Iterator[list[LaneBatch]]:
        return super().rounds(self._padded(batches))

    def _padded(self, batches: Iterator[LaneBatch]) -> Iterator[LaneBatch]:
        """Yield the batches of a step, and others in place of those that other processes have more."""
        batch = next(batches)
        counts = self._placement.counts(batch.turn.present)
        own, most = counts[self._world.rank], max(counts)
        spare = copied(batch.data) if own < most else None  # before a forward changes it
        for number in range(most):
            is_last = number == most - 1
            if number < own:
                batch = next(batches) if number else batch
                require_data(batch)
                yield replace(batch, turn=batch.turn._replace(is_last=is_last))
            else:
                turn = batch.turn._replace(positions=range(0), is_last=is_last)
                yield replace(batch, turn=turn, indices=(), num_samples=0, data=copied(spare))

    def run(self, lanes: Sequence[LaneWork], *, has_backward: bool = True) -> list[Any]:
        losses: list[Any] = []
        for lane in lanes:
            run = partial(self._forward, lane, losses)
            if has_backward:
                self._anchor: torch.Tensor | None = self._callers[self.model](run)
            else:
                self._call(self.model, run)
        return losses

    def _forward(self, lane: LaneWork, losses: list[Any]) -> torch.Tensor:
        """Append the loss of a lane, and return what connects the outputs of all blocks with its backward."""
        self._ran, self._outputs, self._is_in_forward = set(), [], True
        losses.append(lane.loss(lane.forward(self.model, lane.batch.data), lane.batch.data))
        self._is_in_forward = False
        outputs, self._outputs = self._outputs, []
        return connect(torch.zeros((), device=self._world.device, requires_grad=True), outputs)

    @contextmanager
    def gathered(self, module: nn.Module) -> Iterator[None]:
        """Collective: every rank must enter and leave it."""
        caller = self._callers[module]
        caller.unshard()
        try:
            yield
        finally:
            caller.reshard()

    def whole(self, module: nn.Module) -> AbstractContextManager[object]:
        """Collective: every rank must enter it."""
        self._call(module, lambda: None)  # FSDP wants its first forward to begin with the outermost module
        return kept_whole(self._sharded(module))

    def backward(self, turn: LaneTurn, loss: torch.Tensor | None, factor: torch.Tensor | None) -> None:
        """Collective for every lane."""
        anchor, self._anchor = self._anchor, None
        assert anchor is not None, "a lane was not run"
        if turn.is_last:
            checksum = torch.tensor([zlib.crc32(" ".join(self._order).encode())])
            self._wait_for_checksums = self._world.start_all_gather_to_host(
                move(checksum, self._world.device)
            )
        self._contributes = loss is not None
        run_backward(connect(loss, [anchor]), factor)
        for sums in self._sums:
            sums.push(turn.present)
        self._on_backward()

    def finish(self, weight: float) -> None:
        """Finish the sums once the ranks are known to have run the same blocks.

        Raises:
            TaskError: if ranks ran different blocks, and so gathered the weights of other blocks.
        """
        order, self._order = self._order, []
        if len(set(self._wait_for_checksums().flatten().tolist())) > 1:
            raise TaskError(
                f"lanes ran different blocks of the model, rank {self._world.rank} {', '.join(order)}: under "
                "fsdp all lanes must run the same ones in the same order. Name larger blocks, which contain "
                "the choice: distributed.fsdp.blocks."
            )
        for sums in self._sums:
            sums.finish()
        divide_gradients(self.parameters, weight)

    def evaluate(
        self,
        module: nn.Module,
        lanes: Iterable[Lane],
        num_lanes: int | None,
        compute: Callable[[Lane, Any], T],
    ) -> Iterator[tuple[Lane, T]]:
        """Collective: every rank must iterate to the end."""
        first: Lane | None = None
        for lane in equal_forwards(iter(lanes), num_lanes, self._world):
            if lane is not None:
                require_data(lane.batch)
            if first is None:
                assert lane is not None, "a process without samples has one lane without positions"
                first, spare = lane, copied(lane.batch.data)  # before a forward changes it
            if lane is None:
                self._call(module, partial(compute, first, copied(spare)))
            elif lane.batch.turn.positions:
                computed = self._call(module, partial(compute, lane, lane.batch.data))
                if lane.batch.has_samples:
                    yield lane, computed

    def gradient_norms(self) -> torch.Tensor:
        """In `exact` each gradient is gathered, so that its norm equals that on one device."""
        gradients: list[Any] = [p.grad for p in self.parameters if p.grad is not None]
        if self._sums:  # like `get_total_norm`, but one gradient at a time
            return torch.stack([torch._foreach_norm([whole(gradient)])[0] for gradient in gradients])  # noqa: SLF001
        local = torch.stack(torch._foreach_norm([gradient.to_local() for gradient in gradients]))  # noqa: SLF001
        norms = self._world.start_all_gather(local.to(self._world.device))()
        of_parameters: torch.Tensor = torch.linalg.vector_norm(norms, dim=0)
        return of_parameters

    def close(self) -> None:
        super().close()
        for hook in self._hooks:
            hook.remove()
        self._callers.clear()

    def _call(self, module: nn.Module, function: Callable[[], T]) -> T:
        """Call a function that runs the model, or an adopted module, without a backward. Collective."""
        returned: list[T] = []
        self._callers[module](lambda: returned.append(function()))
        reshard(self._sharded(module))
        return returned[0]

    def _sharded(self, module: nn.Module) -> list[Any]:
        """Return the modules that FSDP gathers one at a time: the `Caller` first, then the blocks."""
        return [
            child for child in self._callers[module].modules() if hasattr(child, "set_custom_reduce_scatter")
        ]

    def _describe_blocks(self, model: nn.Module) -> None:
        """Log which blocks are gathered one at a time, and how many parameters are in no block."""
        _, *blocks = self._sharded(model)
        inside = {parameter for block in blocks for parameter in block.parameters()}
        names = Counter(type(block).__name__.removeprefix("FSDP") for block in blocks)
        num_outside = sum(parameter.numel() for parameter in model.parameters() if parameter not in inside)
        logger.info(
            "fsdp gathers one at a time: %s; in no block: %d of %d parameters",
            ", ".join(f"{count} {name}" for name, count in names.items()) or "nothing",
            num_outside,
            sum(parameter.numel() for parameter in model.parameters()),
        )

    def _hook_gathered(self, module: nn.Module) -> None:
        """Hook a module's gathered parameters in its first forward, in which they appear.

        After each backward the hook discards the gradient of a lane that contributes nothing, and calls the
        notes of `register_hooks`.
        """

        def after_backward(parameter: torch.Tensor, name: str) -> None:
            if not self._contributes:
                parameter.grad = None
            for note in self._notes.values():
                note(name, parameter)

        def find(_module: nn.Module, _inputs: Any) -> None:
            handle.remove()
            for name, parameter in self.model.named_parameters():
                if is_sharded(parameter) or parameter in self._gathered:
                    continue
                self._gathered[parameter] = name
                if parameter.requires_grad:
                    hook = partial(after_backward, name=name)
                    self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))

        handle = module.register_forward_pre_hook(find)
        self._hooks.append(handle)

    def _note_outputs(self, block: nn.Module, _inputs: Any, outputs: Any) -> None:
        differentiable = [tensor for tensor in tensors_in(outputs) if tensor.requires_grad]
        gather_before_backward(block, differentiable)
        if self._is_in_forward:
            self._order.append(self._names[block])
            self._outputs += differentiable
            if differentiable:
                self._ran.add(block)
        elif differentiable and block not in self._ran:
            name = type(block).__name__.removeprefix("FSDP")
            raise TaskError(
                f"a {name} is checkpointed with use_reentrant=True, which hides it from the backward of a "
                "lane without weight under fsdp. Use checkpoint(..., use_reentrant=False)."
            )
