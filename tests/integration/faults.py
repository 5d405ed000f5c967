"""A task in which one rank fails, stops or hangs: where, when and how its arguments say."""

import ctypes
import os
import re
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, default_collate

from lanewise import Task

STEP_SAMPLES = 8
"""The global batch; samples are read in their order, so that an index says in which step it is."""
COMMUNICATES_AFTER_SECONDS = 0.3
SECONDS_TO_BE_KNOWN = 1.2
"""A rank that dies without a word is known to be where it was when it last told, twice a second."""
GROUP_VARIABLE = "LANEWISE_TEST_CGROUP"


def fill_addresses() -> None:
    """Ask for more memory than this process may have."""
    used = next(line for line in Path("/proc/self/status").read_text().splitlines() if "VmSize" in line)
    limit = (int(used.split()[1]) << 10) + (200 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    torch.ones(1 << 28)


def fill_group() -> None:
    """Use more memory than a control group may have, which `cases.memory_group` made."""
    Path(os.environ[GROUP_VARIABLE], "cgroup.procs").write_text(str(os.getpid()))
    kept = []
    while True:
        kept.append(torch.ones(1 << 22))


def raise_error() -> None:
    raise ValueError("the image is upside down")


def loop() -> None:
    while True:
        pass


def deadlock() -> None:
    lock = threading.Lock()
    while lock.acquire():
        pass


FAULTS: Mapping[str, Callable[[], object]] = {
    "exception": raise_error,
    "sys.exit": sys.exit,  # a mistake of the user, which a restart would repeat
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGSEGV": lambda: ctypes.string_at(0),
    "os._exit(3)": lambda: os._exit(3),
    "RLIMIT_AS": fill_addresses,
    "cgroup": fill_group,
    "loop": loop,
    "loop in C": lambda: re.match("(a+)+$", "a" * 100 + "b"),  # which keeps the interpreter's lock
    "SIGSTOP": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "deadlock": deadlock,
    "none": lambda: None,  # where something else makes it fail, such as a full disk
}
SILENT = ("SIGKILL", "SIGSEGV", "os._exit(3)", "cgroup", "loop in C", "SIGSTOP")
"""Those after which no code of the process runs."""


class Faulty(Task):
    """Linear regression, in which one rank fails in one phase of one step.

    Args:
        mark: the file that gets a line right before each fault: its time.
        what: one of `FAULTS`.
        phase: start, data, collate, forward, backward, communication, evaluation or save.
        rank: who fails; None: nobody.
        step: when; in `evaluation` and `save`, the first time after it.
        once: whether it fails no second time, after a restart.
        slow: how many seconds a phase takes on every rank, each time.
        ballast_mib: of which every checkpoint gets heavier.
        slowness: of the machine, as the test measured it that waits; ssh hands a rank no variable of it.
    """

    def __init__(
        self,
        mark: str,
        what: str = "exception",
        phase: str = "forward",
        rank: int | None = 1,
        step: int = 2,
        once: bool = False,
        slow: Mapping[str, float] | None = None,
        ballast_mib: int = 0,
        *,
        slowness: int = 1,
    ) -> None:
        self.mark = Path(mark)
        self.what = what
        self.place = (phase, rank)
        self.step = step
        self.once = once
        self.slow = dict(slow or {})
        self.ballast_mib = ballast_mib
        self.slowness = slowness
        self.reached = -1
        """The step whose forward ran last."""

    def pass_through(self, phase: str, *, is_time: bool) -> None:
        """Take the time that a phase takes, and fail there if this is the rank and the time to."""
        time.sleep(self.slow.get(phase, 0))
        if is_time and (phase, rank()) == self.place:
            self.fail()

    def fail(self) -> None:
        if self.once and self.mark.exists():
            return
        if self.what in SILENT:
            time.sleep(self.slowness * SECONDS_TO_BE_KNOWN)
        with self.mark.open("a", encoding="utf-8") as file:
            file.write(f"{time.monotonic()}\n")
        FAULTS[self.what]()

    def build_model(self) -> nn.Module:
        self.pass_through("start", is_time=True)
        model = nn.Linear(1, 1)
        model.register_buffer("ballast", torch.zeros(self.ballast_mib << 18))
        model.register_state_dict_pre_hook(
            lambda *_: self.pass_through("save", is_time=self.reached >= self.step)
        )
        return model

    def train_dataset(self) -> Dataset[Any]:
        return Samples(40 * STEP_SAMPLES, self)

    def eval_datasets(self) -> dict[str, Dataset[Any]]:
        return {"all": Samples(4 * STEP_SAMPLES)}

    def collate(self, samples: list[Any]) -> Any:
        if torch.utils.data.get_worker_info() is not None or self.reached == self.step - 1:
            self.pass_through("collate", is_time=samples[0][0] // STEP_SAMPLES == self.step)
        return default_collate(samples)

    def forward(self, model: nn.Module, batch: Any) -> torch.Tensor:
        if not torch.is_grad_enabled():
            self.pass_through("evaluation", is_time=self.reached >= self.step)
            return model(batch[1])
        is_first_lane = self.reached != (step := int(batch[0][0]) // STEP_SAMPLES)
        self.reached = step
        is_time = is_first_lane and step == self.step
        self.pass_through("forward", is_time=is_time)
        if is_time and self.place[0] == "communication":
            # The one that fails waits for the others then.
            if rank() == self.place[1]:
                threading.Timer(self.slowness * COMMUNICATES_AFTER_SECONDS, self.fail).start()
            else:
                time.sleep(self.slowness * (2 * COMMUNICATES_AFTER_SECONDS + SECONDS_TO_BE_KNOWN))
        outputs = model(batch[1])
        outputs.register_hook(lambda _: self.pass_through("backward", is_time=is_time))
        return outputs

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return F.mse_loss(outputs, batch[1])


class Samples(Dataset[Any]):
    """Numbers, of which a task may fail to read some.

    Args:
        num_samples: how many.
        task: whose phase `data` this is.
    """

    def __init__(self, num_samples: int, task: Faulty | None = None) -> None:
        self.num_samples = num_samples
        self.task = task

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Any:
        # What is read before training, to compare the datasets of the ranks, is no phase of a step.
        is_loaded = torch.utils.data.get_worker_info() is not None
        if self.task is not None and (is_loaded or self.task.reached == self.task.step - 1):
            self.task.pass_through("data", is_time=index // STEP_SAMPLES == self.task.step)
        return index, torch.tensor([index / self.num_samples])


def rank() -> int:
    """The rank of this process, under any launcher."""
    return int(os.environ.get("RANK") or os.environ.get("SLURM_PROCID", "0"))
