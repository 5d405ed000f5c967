"""The accelerators on which tests of this folder run: GPUs, and the device of `tests/fake_device`."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from lanewise.testing import run_distributed
from tests.fake_device.build import why_not
from tests.fake_device.device import DEVICE, NUM_DEVICES, plug_in
from tests.fake_device.run import run


@dataclass(frozen=True)
class Device:
    """A type of devices."""

    type: str

    @property
    def count(self) -> int:
        """How many there are."""
        return NUM_DEVICES if self.type == DEVICE else torch.cuda.device_count()

    @property
    def name(self) -> str:
        """The model of the first one."""
        return "emulated accelerator" if self.type == DEVICE else torch.cuda.get_device_name(0)

    def run(self, function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
        """Call `function(world, *args)` in so many processes; where there are too few GPUs, they share one.

        Returns:
            What each rank returned.
        """
        if self.type != DEVICE and world_size > self.count:
            return run_distributed(function, world_size, *args, device=f"{self.type}:0")
        return self.run_apart(function, world_size, *args)

    def run_apart(self, function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
        """Do the same with a device for each process, or skip the test."""
        if world_size > self.count:
            pytest.skip(f"needs {world_size} devices of type {self.type}: there are {self.count}")
        ended = run(function, world_size, *args, order="last", device_type=self.type)
        return [of_rank.value for of_rank in ended]

    def lanewise(self, folder: Path, *arguments: object) -> None:
        """Run `lanewise ARGUMENTS` to its end in a folder, where the devices are those of this type."""
        environment = plug_in(folder / "plugins", "last") if self.type == DEVICE else None
        command = [sys.executable, "-m", "lanewise", *map(str, arguments)]
        subprocess.run(command, check=True, cwd=folder, env=environment)


EMULATED = (
    pytest.mark.slow,
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
    pytest.mark.timeout(600),  # the first test builds the device
)


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu), pytest.param(DEVICE, marks=EMULATED)])
def device(request: pytest.FixtureRequest) -> Device:
    """A type of devices that is there."""
    return Device(request.param)
