"""What a job is, and what is checked before any process starts for it."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from lanewise.config import RunConfig, pinned_variables
from lanewise.errors import ConfigError
from lanewise.lanes import lane_ranges
from lanewise.processes.world.environment import Environment

if TYPE_CHECKING:
    from lanewise.processes.world.world import World
    from lanewise.task import Task


@dataclass(frozen=True)
class Job(ABC):
    """A configuration, and what to do with it on every process of a world."""

    config: RunConfig
    task: "Task | None" = None
    """The user's task, where it was given as an object; None: built from the configuration."""
    untrusted: tuple[str, ...] = field(default=(), kw_only=True)
    """Folders that no code may come from."""
    trains: ClassVar[bool] = True
    """Whether an optimizer steps."""
    can_stop: ClassVar[bool] = False
    """Whether the job, told so by a file, ends by itself in good order; else signals end its processes."""

    @abstractmethod
    def run(self, world: "World") -> Any:
        """Do it. Collective: every rank must call this. What rank 0 returns is the result."""

    def claim(self, *, is_restarted: bool = False) -> AbstractContextManager[object]:
        """Keep others from writing what this job writes, while it runs.

        Args:
            is_restarted: whether an earlier start of the same launch may have begun it.
        """
        return nullcontext()

    def require_free(self) -> None:  # noqa: B027 - most jobs write nothing
        """Raise RunDirError if there is already what the job would write; takes no time."""

    def settled(self, agree: Callable[[Callable[[], str]], str] = lambda choose: choose()) -> "Job":
        """Return the job with what is chosen once for all processes.

        Args:
            agree: returns what rank 0 chose.
        """
        return self

    def program(self, config_file: str) -> Sequence[str]:
        """Return what follows `lanewise` to do this job in a prepared world that the cluster may start again.

        Args:
            config_file: where the configuration is there.

        Raises:
            ConfigError: no command does it.
        """
        raise ConfigError(
            f"distributed.launcher {self.config.distributed.launcher} is for training. "
            "Evaluate with distributed.launcher local, or in a world that torchrun prepared."
        )

    @property
    def variables(self) -> dict[str, str]:
        """What its processes have in their environment when Python starts."""
        return pinned_variables(self.config.distributed.threads, self.config.distributed.equality)

    @property
    def shared_folder(self) -> Path | None:
        """The folder that the processes of all hosts write together, if they do."""
        return None

    @property
    def stands_still(self) -> bool:
        """Whether it got no further between the last two times that it was told to stop."""
        return False

    def log_file(self, rank: int) -> Path:
        """Return where a rank logs."""
        return Path(os.devnull)

    def check(self, environment: Environment) -> None:
        """Find what is wrong with the configuration and its classes, before any worker starts.

        Args:
            environment: one process of the world that is meant to be.

        Raises:
            ConfigError: lists every mistake that was found.
        """
        from lanewise.config.classes import check_classes

        distributed = self.config.distributed
        if distributed.is_one_process and environment.world_size > 1:
            raise ConfigError(
                f"distributed.reducer {distributed.reducer} drives all its devices from one process: got "
                f"{environment.world_size} processes. Start one, or use distributed.reducer=ddp."
            )
        if distributed.num_processes not in (None, environment.local_world_size):
            raise ConfigError(
                f"distributed.devices contradicts the launcher: got {distributed.num_devices}, and "
                f"{environment.local_world_size} processes were started on this machine. "
                "Under a launcher leave the key out, or give --distributed.devices null."
            )
        num_devices = distributed.num_devices or environment.local_world_size
        num_workplaces = num_devices if distributed.is_one_process else environment.world_size
        lane_ranges(self.config.batch.num_lanes, num_workplaces)  # raises where one would have no lane
        check_classes(self.config, has_task=self.task is not None, untrusted=self.untrusted)

    def check_devices(self, environment: Environment) -> None:
        """Find what is wrong with the devices of this machine.

        Args:
            environment: as for `check`.

        Raises:
            ConfigError: there are too few, or they can't do what the configuration asks for.
        """
        from lanewise.config.optimizer_rules import check_optimizer
        from lanewise.processes.device.choice import choose_backend, choose_devices

        distributed = self.config.distributed
        num_devices = distributed.num_devices or environment.local_world_size
        devices = choose_devices(distributed.device_type, num_devices, distributed.device_names)
        if distributed.sync_batch_norm and "cpu" in devices:
            raise ConfigError(
                "distributed.sync_batch_norm needs accelerators, as torch's SyncBatchNorm does: got the CPU. "
                "Leave it out: BatchNorm's statistics are merged over the lanes after each step."
            )
        choose_backend(distributed.backend, devices, environment.world_size)
        check_optimizer(self.config, devices)
