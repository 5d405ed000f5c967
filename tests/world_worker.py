"""`python -m tests.world_worker FOLDER RANK WORLD_SIZE`: a rank of a world that `tests/worlds.py` keeps."""

import gc
import logging
import os
import pickle
import random
import signal
import socket
import sys
import time
import traceback
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from lanewise.processes.world.shared_memory import share_memory
from lanewise.processes.world.world import GroupWorld, LocalWorld, World


class State:
    """What a function may change that the next one must not see."""

    def __init__(self) -> None:
        self.random = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
        self.switches = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )
        self.dtype = torch.get_default_dtype()
        self.threads = torch.get_num_threads()
        self.precision = torch.get_float32_matmul_precision()
        self.fill = torch.utils.deterministic.fill_uninitialized_memory
        self.filters = list(warnings.filters)
        self.handlers = {name: _of(logging.getLogger(name)) for name in ("", "lanewise")}
        signs = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
        self.signals = {sign: signal.getsignal(sign) for sign in signs}

    def put_back(self) -> None:
        """Put it back."""
        random.setstate(self.random[0])
        np.random.set_state(self.random[1])  # noqa: NPY002
        torch.set_rng_state(self.random[2])
        torch.use_deterministic_algorithms(self.switches[0], warn_only=self.switches[1])
        torch.set_default_dtype(self.dtype)
        torch.set_num_threads(self.threads)
        torch.set_float32_matmul_precision(self.precision)
        torch.utils.deterministic.fill_uninitialized_memory = self.fill
        torch.set_grad_enabled(True)
        warnings.filters[:] = self.filters
        warnings._filters_mutated()
        for name, (level, handlers, filters) in self.handlers.items():
            logger = logging.getLogger(name)
            logger.setLevel(level)
            logger.handlers[:], logger.filters[:] = handlers, filters
        for name in set(logging.root.manager.loggerDict):
            logger = logging.root.manager.loggerDict[name]
            if name.startswith("lanewise.") and isinstance(logger, logging.Logger):
                logger.setLevel(logging.NOTSET)
                logger.handlers[:], logger.filters[:] = [], []
        for sign, handler in self.signals.items():
            signal.signal(sign, handler)


def _of(logger: logging.Logger) -> Any:
    return logger.level, list(logger.handlers), list(logger.filters)


def work(folder: Path, rank: int, world_size: int) -> None:
    """Run functions until the other side hangs up."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    number = os.dup(0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    channel = socket.socket(fileno=number)
    state = State()
    lines = channel.makefile("r")
    while line := lines.readline():
        is_error = _call(folder, rank, world_size, int(line))
        state.put_back()
        gc.collect()  # what a function left must not be collected in the middle of the next
        channel.sendall(b"-" if is_error else b"+")
    os._exit(0)


def _call(folder: Path, rank: int, world_size: int, number: int) -> bool:
    try:
        written = pickle.loads((folder / f"call-{number}").read_bytes())
        sys.path[:], cwd, environment, call, one_machine = written
        os.environ.clear()
        os.environ.update(environment)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.chdir(cwd)
        function, args = pickle.loads(call)
        device = torch.device("cpu")
        world: World = LocalWorld(device)
        own = folder / str(number)
        own.mkdir(exist_ok=True)
        if world_size > 1:
            store = dist.FileStore(f"{own}/store", world_size)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
            memory = share_memory(own) if one_machine else None
            world = GroupWorld(device, store, memory)
            dist.barrier()  # else a rank that ends at once hangs up on one that is still connecting
        is_error, result = False, pickle.dumps((time.monotonic(), False, function(world, *args)))
        world.close()
        del function, args, world
    except Exception:  # noqa: BLE001 - shown by the caller
        # Said when it happened: the others fail once this rank leaves the group.
        is_error, result = True, pickle.dumps((time.monotonic(), True, traceback.format_exc()))
        with suppress(Exception):
            dist.destroy_process_group()
    (folder / f"{rank}.tmp").write_bytes(result)
    (folder / f"{rank}.tmp").rename(folder / f"result-{number}-{rank}")
    return is_error


if __name__ == "__main__":
    work(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
