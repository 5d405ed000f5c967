"""Several devices in one process, as in torch's DataParallel: each device has a replica of the model.

[Note: copies between devices]
Once per optimizer step the weights are copied from the first device to the others, and the gradients are
copied back. In between, each round of lanes (one lane for each device) runs at once:

    data_parallel             first        others
      the lane's batch        ->           copied there
      forward                 outputs      outputs -> copied to the first
      loss                    of all       none
    balanced_data_parallel
      forward, loss           its own      their own: a sum and a weight travel

So data_parallel holds the outputs and losses of a whole round on the first device, whose memory they fill
(large vocabularies, dense predictions). balanced_data_parallel keeps them on the devices that computed them,
like PyTorch-Encoding's DataParallelCriterion (H. Zhang), but with each lane's own weight instead of a mean of
means.

[Note: autocast and threads]
In a forward autocast casts a weight once, so the gradients of its uses are added in 16 bits. But the casts of
all threads are kept together, and a thread that leaves autocast discards them: a lane in the middle of its
forward would cast its weights again, and the gradients would be added otherwise. So the threads of lanes
discard nothing, as if they were in an outer autocast, and all casts are discarded when no lane runs.
"""

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any, TypeVar, final

import torch
from torch import nn

from lanewise.config import Equality
from lanewise.lanes import LaneTurn
from lanewise.processes.device.accelerator import move, set_current_device
from lanewise.processes.device.random_state import take_random_state
from lanewise.reduce.reducer import (
    LaneWork,
    Reducer,
    divide_gradients,
    trained_parameters,
    without_loss,
)

T = TypeVar("T")
_PLAIN = (bool, int, float, str)
"""Types of attributes that a task may set after an update, such as the probability of a dropout."""


@final
class ReplicaReducer(Reducer):
    """Runs lanes on several devices of one process, and adds their gradients on the first one.

    On GPUs each lane of a round has a thread, and draws from its device's generator. On the CPU, or where a
    GPU is named several times, lanes take turns, since they would draw from the same generator.

    Args:
        model: the user's module, on the first device.
        num_lanes: number of lanes of the run.
        devices: the devices on which lanes run; a device may occur several times.
        equality: in `exact` each lane's gradient is copied to the first device, and added there in the tree.
            In `close` each device adds its lanes, and one sum for each device is copied.
        balanced: whether each device computes the loss of its lanes; if not, the first one computes all.
    """

    def __init__(
        self,
        model: nn.Module,
        num_lanes: int,
        devices: Sequence[torch.device],
        equality: Equality,
        *,
        balanced: bool,
    ) -> None:
        super().__init__(model, num_lanes, equality)
        self.replicas = [model, *(_copy(model, device) for device in devices[1:])]
        self._devices = devices
        self._trained = [self.parameters, *map(trained_parameters, self.replicas[1:])]
        self._balanced = balanced
        self._is_stale = True
        self._round: list[tuple[LaneTurn, torch.Tensor, torch.Tensor | None]] = []
        self._threads: ThreadPoolExecutor | None = None
        self.runs_at_once = devices[0].type != "cpu" and len(set(devices)) == len(devices)
        if self.runs_at_once:
            self._threads = ThreadPoolExecutor(
                len(devices), "replica", initializer=torch.autocast_increment_nesting
            )

    def run(self, lanes: Sequence[LaneWork], *, has_backward: bool = True) -> list[Any]:
        if self._is_stale:
            self._send_weights()
        if self._threads is None:
            return [self._run_lane(number, lane) for number, lane in enumerate(lanes)]
        try:
            forwards = list(self._threads.map(_in_context(self._forward), range(len(lanes)), lanes))
            torch.clear_autocast_cache()  # see [Note: autocast and threads]
            if self._balanced:
                return list(
                    self._threads.map(_in_context(self._own_loss), range(len(lanes)), lanes, forwards)
                )
        finally:
            torch.clear_autocast_cache()
        return [
            self._loss_on_first(lane, outputs, go_on) if lane.batch.has_samples else None
            for lane, (_, outputs, go_on) in zip(lanes, forwards, strict=True)
        ]

    def backward(self, turn: LaneTurn, loss: torch.Tensor | None, factor: torch.Tensor | None) -> None:
        """The lanes of a round have one backward, which runs on all devices at once."""
        self._round.append((turn, without_loss(self.parameters) if loss is None else loss, factor))
        if len(self._round) < len(self.replicas) and not turn.is_last:
            return
        in_round, self._round = self._round, []
        _, losses, factors = zip(*in_round, strict=True)
        torch.autograd.backward(losses, factors)
        if self._pending is not None:
            for (lane_turn, _, _), trained in zip(in_round, self._trained, strict=False):
                self._pending.push(lane_turn, trained)

    def finish(self, weight: float) -> None:
        if self._pending is not None:
            self._pending.restore_root()
        else:
            for trained in self._trained[1:]:
                self._add(trained)
        divide_gradients(self.parameters, weight)
        self._is_stale = True

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown()

    def _run_lane(self, replica: int, lane: LaneWork) -> Any:
        """Run a lane from its random state to its loss; None without samples."""
        if not lane.batch.has_samples:
            return None
        data, outputs, go_on = self._forward(replica, lane)
        return lane.loss(outputs, data) if self._balanced else self._loss_on_first(lane, outputs, go_on)

    def _forward(self, replica: int, lane: LaneWork) -> tuple[Any, Any, Callable[[], None]]:
        """Run a lane's forward; return its moved batch, its outputs, and what restores its random state."""
        if not lane.batch.has_samples:
            return None, None, _go_on
        device = self._devices[replica]
        set_current_device(device)  # of this thread
        data = move(lane.batch.data, device)
        outputs = lane.forward(self.replicas[replica], data)
        has_one_generator = self._balanced or device.type == "cpu"
        return data, outputs, _go_on if has_one_generator else take_random_state()

    def _own_loss(self, replica: int, lane: LaneWork, forward: tuple[Any, Any, Callable[[], None]]) -> Any:
        """Compute a lane's loss where its forward ran; None without samples."""
        if not lane.batch.has_samples:
            return None
        set_current_device(self._devices[replica])  # of this thread, which may be another one
        data, outputs, _ = forward
        return lane.loss(outputs, data)

    def _loss_on_first(self, lane: LaneWork, outputs: Any, go_on: Callable[[], None]) -> Any:
        """Move a lane's outputs to the first device and compute its loss, continuing its random numbers."""
        set_current_device(self._devices[0])
        go_on()
        return lane.loss(move(outputs, self._devices[0]), lane.batch.data)

    def _send_weights(self) -> None:
        """Copy weights, and what modules keep in plain attributes; `LaneBuffers` copies buffers."""
        with torch.no_grad():
            for replica in self.replicas[1:]:
                for module, own in zip(self.model.modules(), replica.modules(), strict=True):
                    own.training = module.training
                    vars(own).update({key: one for key, one in vars(module).items() if type(one) in _PLAIN})
                for sent, received in zip(self.model.parameters(), replica.parameters(), strict=True):
                    received.copy_(sent, non_blocking=True)
        self._is_stale = False

    def _add(self, trained: Sequence[nn.Parameter]) -> None:
        """Add a replica's gradients to those on the first device."""
        for parameter, other in zip(self.parameters, trained, strict=True):
            if other.grad is not None:
                gradient = other.grad.to(parameter.device)
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
            other.grad = None


def _in_context(function: Callable[..., T]) -> Callable[..., T]:
    """Return what runs a function in another thread under the context variables of this one."""
    context = copy_context()
    return lambda *arguments: context.copy().run(function, *arguments)


def _go_on() -> None:
    """Leave the random state as it is."""


def detach_computed(model: nn.Module) -> None:
    """Detach what modules keep and compute anew in each forward: with its graph it could not be copied.

    Such is the weight of `torch.nn.utils.weight_norm`.
    """
    for module in model.modules():
        for name, value in [*vars(module).items()]:
            if isinstance(value, torch.Tensor) and not value.is_leaf:
                setattr(module, name, value.detach())


def _copy(model: nn.Module, device: torch.device) -> nn.Module:
    """Copy a module to a device with the same strides: with others, kernels may add in another order."""
    detach_computed(model)
    copied = copy.deepcopy(model).to(device)
    for parameter, own in zip(trained_parameters(model), trained_parameters(copied), strict=True):
        if own.stride() != parameter.stride():  # deepcopy makes a sliced parameter dense
            own.data = torch.empty_strided(
                own.size(), parameter.stride(), dtype=own.dtype, device=own.device
            ).copy_(own.data)
    return copied
