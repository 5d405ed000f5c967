"""The emulated device `emulated`, as torch knows cuda: `register` makes it known to this process.

Nothing of it touches a device, so a process may register it and then fork.
"""

import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from tests.fake_device import batch_norm
from tests.fake_device.build import NAME, build

DEVICE = "emulated"
NUM_DEVICES = 4
"""As many as there can be."""
ORDERS = ("now", "last", "main_first", "side_first", *(f"random-{seed}" for seed in range(4)))
"""In which work of several streams runs: see runtime.hpp."""


def register(order: str = "now") -> ModuleType:
    """Make the device known to torch, unless it is; return its module.

    Args:
        order: one of `ORDERS`, or `random-` with another seed.
    """
    known = getattr(torch, DEVICE, None)
    if known is None:
        spec = importlib.util.spec_from_file_location(NAME, build())
        assert spec is not None
        assert spec.loader is not None
        torch.utils.rename_privateuse1_backend(DEVICE)
        native = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(native)
        known = _Module(native)
        torch._register_device_module(DEVICE, known)
        sys.modules[f"torch.{DEVICE}"] = known
        torch.__future__.set_swap_module_params_on_conversion(True)
        torch.Tensor.data = property(torch._C.TensorBase.data.__get__, _set_data)
        known.kernels = batch_norm.register()
        dist.Backend.register_backend(DEVICE, _connect, extended_api=True, devices=[DEVICE])
    known.set_order(order)
    return known


def plug_in(folder: Path, order: str) -> dict[str, str]:
    """Return the environment of programs that find the device as torch finds devices which it does not ship.

    Args:
        folder: gets a package whose entry point torch calls when it is imported.
        order: see `register`.
    """
    package = folder / f"{DEVICE}-1.dist-info"
    package.mkdir(parents=True, exist_ok=True)
    (package / "entry_points.txt").write_text(f"[torch.backends]\n{DEVICE} = {__name__}:_register_by_torch\n")
    root = Path(__file__).parents[2]
    places = [str(folder), str(root), str(root / "src")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(places), _ORDER: order}


_ORDER = "FAKE_DEVICE_ORDER"


def _register_by_torch() -> None:
    register(os.environ[_ORDER]).set_num_devices(NUM_DEVICES)


def _set_data(tensor: torch.Tensor, new: torch.Tensor) -> None:
    """Do what an assignment to `tensor.data` does, also from the CPU to the device.

    torch refuses that for devices that it does not ship, and FSDP moves parameters in this way. For modules
    there is the setting above: without it, a parameter that occurs twice would become two.
    """
    if (tensor.device.type == DEVICE) == (new.device.type == DEVICE):
        torch._C.TensorBase.data.__set__(tensor, new)
    elif isinstance(tensor, torch.nn.Parameter):
        torch.utils.swap_tensors(tensor, torch.nn.Parameter(new.detach(), tensor.requires_grad))
    else:
        torch.utils.swap_tensors(tensor, new.detach())


def _connect(options: Any, _: Any) -> Any:
    """Return a process group of the device over one of gloo."""
    gloo = dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, options.timeout)
    return getattr(torch, DEVICE).native.over_gloo(gloo)


class _Module(ModuleType):
    """`torch.emulated`, with the names of `torch.cuda`."""

    Event = torch.Event

    def __init__(self, native: ModuleType) -> None:
        super().__init__(f"torch.{DEVICE}")
        self.native = native
        self.is_initialized = native.is_initialized
        self._is_in_bad_fork = native.is_bad_fork
        self.waits = native.waits
        self._num_devices = 2
        self._waits_before: dict[str, int] | None = None
        self.set_memory_limit = native.set_memory_limit

    @property
    def _initialized(self) -> bool:
        """What torch.utils.checkpoint asks before it keeps the states of generators."""
        return self.native.is_initialized()

    def set_order(self, order: str) -> None:
        """Let work run in one of `ORDERS` from now on."""
        name, _, seed = order.partition("-")
        self.native.set_order(name, int(seed or 0))

    def set_num_devices(self, count: int) -> None:
        """Have so many devices, before any is used; at most four."""
        self.native.set_num_devices(count)
        self._num_devices = count

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return self._num_devices

    def current_device(self) -> int:
        return torch.accelerator.current_device_index()

    def set_device(self, device: Any) -> None:
        torch.accelerator.set_device_index(device)

    def device(self, device: Any) -> AbstractContextManager[object]:
        return torch.accelerator.device_index(self._device(device).index)

    def synchronize(self, device: Any = None) -> None:
        torch.accelerator.synchronize(device)

    def get_device_name(self, device: Any = None) -> str:
        return "emulated accelerator"

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def set_sync_debug_mode(self, mode: str) -> None:
        """As `torch.cuda`'s: "default" raises an error if the host waited for a value since "error"."""
        waits = {kind: count for kind, count in self.waits().items() if kind in ("item", "copy", "shape")}
        before, self._waits_before = self._waits_before, waits if mode == "error" else None
        if before is not None and before != waits:
            raise RuntimeError(f"called a synchronizing operation: {before} became {waits}")

    def Stream(self, device: Any = None, priority: int = 0) -> torch.Stream:  # noqa: N802 - as torch.cuda.Stream
        return torch.Stream(self._device(device), priority=priority)

    def current_stream(self, device: Any = None) -> torch.Stream:
        return torch.accelerator.current_stream(device)

    @contextmanager
    def stream(self, stream: torch.Stream) -> Iterator[None]:
        before = torch.accelerator.current_stream(stream.device)
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)

    def manual_seed(self, seed: int) -> None:
        self._generator().manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        for index in range(self.device_count()):
            self.native.default_generator(index).manual_seed(seed)

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return self._generator(device).get_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        self._generator(device).set_state(state)

    def max_memory_allocated(self, device: Any = None) -> int:
        return torch.accelerator.max_memory_allocated(device)

    def _generator(self, device: Any = None) -> torch.Generator:
        return self.native.default_generator(self._device(device).index)

    def _device(self, device: Any) -> torch.device:
        if device is None:
            return torch.device(DEVICE, self.current_device())
        if isinstance(device, int):
            return torch.device(DEVICE, device)
        device = torch.device(device)
        return device if device.index is not None else torch.device(DEVICE, self.current_device())
