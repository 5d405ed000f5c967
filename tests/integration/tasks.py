"""Tasks that the tests name in configuration files; small, fast, and most of them wrong in one way."""

import mmap
import os
import resource
import signal
import sys
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from lanewise import Callback, Task, local_rank_zero_first

RANK = int(os.environ.get("RANK") or os.environ.get("OMPI_COMM_WORLD_RANK", "0"))


class Line(Task):
    """Linear regression; sample i has the input i.

    Args:
        num_samples: size of the dataset.
    """

    def __init__(self, num_samples: int = 22) -> None:
        self.num_samples = num_samples

    def build_model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def train_dataset(self) -> Dataset[Any]:
        inputs = torch.arange(float(self.num_samples)).unsqueeze(1)
        return TensorDataset(inputs, 2 * inputs)

    def forward(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch[0] / 22)

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return F.mse_loss(outputs, batch[1])


class OfTheRank(Line):
    """Adds something to every sample that is another on each rank."""

    def train_dataset(self) -> Dataset[Any]:
        inputs, targets = super().train_dataset().tensors
        return TensorDataset(inputs + 0.01 * RANK, targets)


class PrintsAndRaises(Line):
    """Prints wherever a user does, without a flush, and then raises on one rank, or is killed there.

    Args:
        rank: the one that ends, which waits until rank 0 has printed, and says so by a file.
        is_killed: whether it is killed.
    """

    def __init__(self, rank: int = 0, *, is_killed: bool = False) -> None:
        super().__init__()
        self.rank = rank
        self.is_killed = is_killed

    def build_model(self) -> nn.Module:
        print("printed in build_model")
        return super().build_model()

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        print("printed in loss")
        Path(f"printed-{RANK}").touch()
        if self.rank == RANK:
            while not Path("printed-0").exists():
                time.sleep(0.01)
            if self.is_killed:
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("after it was printed")
        return super().loss(outputs, batch)


class PrintsAndStarts(Callback):
    """Prints when the run begins."""

    def on_start(self, start: Any) -> None:
        print("printed in a callback")


class KillsItself(Callback):
    """Kills the process after a step, when trackers had time to send what there was."""

    def __init__(self, after_step: int) -> None:
        self.after_step = after_step

    def on_step(self, epoch: int, step: int, metrics: Mapping[str, float]) -> None:
        if step == self.after_step:
            time.sleep(6)
            os.kill(os.getpid(), signal.SIGKILL)


class Evaluated(Line):
    """Is evaluated on what it is trained on."""

    def eval_datasets(self) -> dict[str, Dataset[Any]]:
        return {"all": self.train_dataset()}


class Slow(Line):
    """Sleeps in each lane, so that there is time to end it from outside."""

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        time.sleep(0.02)
        return super().loss(outputs, batch)


class Noisy(Line):
    """All of its state matters on resume: dropout, BatchNorm, and a line in a file for each micro-batch.

    The files are `ATTEMPT-RANK-PID`, the first by the environment variable; a line is the seed of the lane,
    and the sample indices.

    Args:
        num_samples: size of the dataset; even, as BatchNorm needs two samples in each micro-batch.
        width: hidden units.
        folder: gets the files; unset: none are written.
        sleep_seconds: in each lane.
    """

    def __init__(
        self, num_samples: int = 30, width: int = 8, folder: str | None = None, sleep_seconds: float = 0
    ) -> None:
        super().__init__(num_samples)
        self.width = width
        self.folder = folder
        self.sleep_seconds = sleep_seconds

    def build_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(1, self.width),
            nn.BatchNorm1d(self.width),
            nn.ReLU(),
            nn.Dropout(0.3),
            nn.Linear(self.width, 1),
        )

    def forward(self, model: nn.Module, batch: Any) -> torch.Tensor:
        if self.folder is not None:
            samples = " ".join(str(int(index)) for index in batch[0])
            path = Path(self.folder, f"{os.environ['ATTEMPT']}-{RANK}-{os.getpid()}")
            with path.open("a") as file:
                file.write(f"{torch.initial_seed()} {samples}\n")
        time.sleep(self.sleep_seconds)
        return super().forward(model, batch)


class KilledOnce(Noisy):
    """One rank kills itself in its seventeenth forward, but in the first attempt only.

    Args:
        mark: the file that says that it did.
        rank: the rank.
    """

    def __init__(self, mark: str, rank: int = 1) -> None:
        super().__init__()
        self.mark = Path(mark)
        self.rank = rank
        self.num_calls = 0

    def forward(self, model: nn.Module, batch: Any) -> torch.Tensor:
        self.num_calls += 1
        if self.num_calls == 17 and self.rank == RANK and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(model, batch)


class Stuck(Line):
    """Never gets its data."""

    def train_dataset(self) -> Dataset[Any]:
        time.sleep(600)
        return super().train_dataset()


class SignalledWhereErrorsAreLost(Stuck):
    """Gets a signal where python ignores every error, and never its data."""

    def train_dataset(self) -> Dataset[Any]:
        gone = object.__new__(type("Gone", (), {}))
        gone = Line()
        seen_last = weakref.ref(gone, lambda _: os.kill(os.getpid(), signal.SIGTERM))
        del gone
        assert seen_last() is None
        return super().train_dataset()


def launcher_pid() -> int:
    """Find the process that launched this rank: it has the same standard input, and is no rank."""
    stdin = Path("/proc/self/fd/0").readlink()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended meanwhile, or is another user's
            name = (folder / "comm").read_text()
            if (folder / "fd" / "0").readlink() == stdin and not name.startswith("lanewise: "):
                return int(folder.name)
    raise AssertionError("no process launched this one")


class SignalAtTheEnd(Callback):
    """Sends SIGTERM to the command when the model was written, or when its interpreter shuts down."""

    def __init__(self, when: str) -> None:
        self.when = when

    def on_end(self, error: BaseException | None) -> None:
        if self.when == "shutdown":
            sys.modules[__name__].last = self  # type: ignore[attr-defined]
        else:
            os.kill(os.getpid() if self.when == "alone" else launcher_pid(), signal.SIGTERM)

    def __del__(self, kill: Any = os.kill, pid: int = os.getpid(), sign: int = signal.SIGTERM) -> None:
        if self.when == "shutdown":
            kill(pid, sign)


class Chatty(Line):
    """Prints on every rank."""

    def train_dataset(self) -> Dataset[Any]:
        print(f"python speaks on rank {RANK}", flush=True)
        os.write(1, f"native code speaks on rank {RANK}\n".encode())
        return super().train_dataset()


class RaisesInForward(Line):
    """Raises an ordinary exception in its second step on one rank.

    Args:
        rank: the rank that raises.
        others_sleep_seconds: how long the other ranks are busy then, in no collective.
    """

    def __init__(self, rank: int = 1, others_sleep_seconds: float = 0) -> None:
        super().__init__()
        self.rank = rank
        self.others_sleep_seconds = others_sleep_seconds

    def forward(self, model: nn.Module, batch: Any) -> torch.Tensor:
        if self.progress.number == 1:
            if self.rank == RANK:
                raise ValueError("the image is upside down")
            time.sleep(self.others_sleep_seconds)
        return super().forward(model, batch)


class Downloads(Line):
    """Makes a file where there is none, or fails to.

    Args:
        file: what is downloaded.
        fails: how that ends instead: by an error, or by the end of the process.
    """

    def __init__(self, file: str, fails: str = "") -> None:
        super().__init__()
        self.file = Path(file)
        self.fails = fails

    def train_dataset(self) -> Dataset[Any]:
        with local_rank_zero_first():
            if self.fails == "error":
                raise OSError("no space left")
            if self.fails:
                os.kill(os.getpid(), signal.SIGKILL)
            if RANK == 0:
                time.sleep(0.5)
                self.file.touch(exist_ok=False)
            assert self.file.exists()
        return super().train_dataset()


class MuteError(Exception):
    """Cannot say what it is."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


class Ends(RaisesInForward):
    """Ends its process there instead, as if it were done, or raises an error that cannot be shown."""

    def __init__(self, how: str, rank: int = 1) -> None:
        super().__init__(rank)
        self.how = how

    def forward(self, model: nn.Module, batch: Any) -> torch.Tensor:
        try:
            return super().forward(model, batch)
        except ValueError:
            if self.how == "os":
                os._exit(0)
            elif self.how == "sys":
                sys.exit(0)
            raise MuteError from None


class RaisesInSample(Line):
    """Raises while a sample is read."""

    def train_dataset(self) -> Dataset[Any]:
        return Unreadable()


class Unreadable(Dataset[Any]):
    """Sample 13 cannot be read."""

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> Any:
        if index == 13:
            raise OSError("the file of sample 13 is cut off")
        return torch.tensor([float(index)]), torch.tensor([float(index)])


class NanAtSample13(Line):
    """One target is missing."""

    def train_dataset(self) -> Dataset[Any]:
        inputs = torch.arange(float(self.num_samples)).unsqueeze(1)
        targets = inputs.clone()
        targets[13] = torch.nan
        return TensorDataset(inputs, targets)


class Detached(Line):
    """Its loss has no gradient."""

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return super().loss(outputs, batch).detach()


class OwnDataOnEachRank(Line):
    """What a user of DistributedSampler might write: every rank loads something else."""

    def train_dataset(self) -> Dataset[Any]:
        inputs = torch.arange(float(self.num_samples)).unsqueeze(1) + RANK
        return TensorDataset(inputs, 2 * inputs)


class NoTask:
    """A class, but no Task."""


class Deep(Line):
    """Of which not even one sample fits: its blocks save 10 MiB each, and the process may take 300 MiB more.

    Args:
        num_blocks: how many blocks there are.
    """

    def __init__(self, num_blocks: int = 40) -> None:
        super().__init__(num_samples=4)
        self.num_blocks = num_blocks

    def build_model(self) -> nn.Module:
        used = next(line for line in Path("/proc/self/status").read_text().splitlines() if "VmSize" in line)
        limit = (int(used.split()[1]) << 10) + (300 << 20)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        blocks = [
            nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)) for _ in range(self.num_blocks)
        ]
        return nn.Sequential(nn.Linear(1, 16), nn.Sequential(*blocks))

    def forward(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch[0].expand(1 << 15, 1)).mean().reshape(1, 1)


class Greedy(Line):
    """Takes 100 MiB of addresses for each sample besides; the process may take 1,000 MiB more."""

    def build_model(self) -> nn.Module:
        used = next(line for line in Path("/proc/self/status").read_text().splitlines() if "VmSize" in line)
        limit = (int(used.split()[1]) << 10) + (1000 << 20)
        if resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY:
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        return super().build_model()

    def forward(self, model: nn.Module, batch: Any) -> torch.Tensor:
        with mmap.mmap(-1, len(batch[0]) * 100 << 20):
            return super().forward(model, batch)
