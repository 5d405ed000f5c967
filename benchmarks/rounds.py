"""Lets sides train in turns, each in processes of its own, and says how long their turns took."""

import json
import math
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Hashable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import islice
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any, TypeVar

from sides import installed
from workload import Workload

import lanewise.commands.bench.rounds

K = TypeVar("K", bound=Hashable)
PROGRAM = Path(__file__).with_name("sides.py")


@dataclass(frozen=True, kw_only=True)
class Training:
    """What a side trains, on how many processes."""

    side: str
    work: Workload
    num_processes: int = 1
    is_alone: bool = False
    """Whether each process trains its share of every step by itself, and never talks to the others."""


def take_turns(
    trainings: Mapping[K, Training], *, num_rounds: int, steps_per_turn: int
) -> dict[K, list[float]]:
    """Train all at once, one at a time: A B C A B C.

    Args:
        trainings: by a name; those whose library is not installed are left out.
        num_rounds: how many turns each one has, after one that warms up.
        steps_per_turn: optimizer steps in a turn.

    Returns:
        The seconds of a step, in each round.
    """
    sides = installed(dict.fromkeys(one.side for one in trainings.values()))
    present = {name: one for name, one in trainings.items() if one.side in sides}
    with ExitStack() as stack:
        running = {
            name: Processes(one, (num_rounds + 1) * steps_per_turn + 1, steps_per_turn, stack)
            for name, one in present.items()
        }
        for processes in running.values():
            processes.wait()
        turns = {name: processes.take_turn for name, processes in running.items()}
        _, *rounds = islice(lanewise.commands.bench.rounds.take_turns(turns), num_rounds + 1)
        losses = {name: processes.take_last_turn() for name, processes in running.items()}
    require_equal_work(present, losses)
    return {name: [seconds[name] / steps_per_turn for seconds in rounds] for name in present}


class Processes:
    """The processes of one training; rank 0 waits for its turns, and the others for rank 0.

    Args:
        training: what they train.
        num_steps: how long.
        steps_per_turn: optimizer steps in a turn.
        stack: ends them, and removes what they leave.
    """

    def __init__(self, training: Training, num_steps: int, steps_per_turn: int, stack: ExitStack) -> None:
        self._name = training.side
        self._log: IO[bytes] = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - the stack closes it
        self._turns: list[Connection[Any, Any]] = []
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        num_processes, work = training.num_processes, replace(training.work, num_steps=num_steps)
        samples_per_turn = steps_per_turn * work.global_batch_size // num_processes
        if training.is_alone:
            work = replace(work, num_micro_batches=work.num_micro_batches // num_processes)
        command = [sys.executable, str(PROGRAM), training.side, work.name, json.dumps(asdict(work))]
        port = reserve_port(stack)
        for rank in range(num_processes):
            world, turns, files = {}, [], []
            if num_processes > 1 and not training.is_alone:
                world = torchrun_variables(rank, num_processes, port)
            if rank == 0 or training.is_alone:
                ours, theirs = Pipe()
                self._turns.append(ours)
                turns = [str(theirs.fileno()), str(samples_per_turn)]
                files = [theirs]
            cwd = folder / (str(rank) if training.is_alone else "all")
            cwd.mkdir(exist_ok=True)
            process = subprocess.Popen(
                [*command, *turns],
                cwd=cwd,
                env={**os.environ, "OMP_NUM_THREADS": "1", **world},
                stdout=self._log,
                stderr=self._log,
                pass_fds=[file.fileno() for file in files],
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            for file in files:
                file.close()  # so that the end of the process is the end of the pipe

    def wait(self) -> list[Any]:
        """Return what each one says when it comes to the end of its turn."""
        try:
            return [turns.recv() for turns in self._turns]
        except EOFError:
            self._log.seek(0)
            log = self._log.read().decode(errors="replace")
            raise SystemExit(f"{self._name} failed:\n{log[-5000:]}") from None

    def take_turn(self) -> float:
        """Let them train; return the seconds of the slower one."""
        for turns in self._turns:
            turns.send(None)
        return float(max(self.wait()))

    def take_last_turn(self) -> tuple[float, float]:
        """Let them come to the end; return the loss of the model before and after."""
        for turns in self._turns:
            turns.send(None)
        before, after = self.wait()[0]
        return before, after


def require_equal_work(trainings: Mapping[K, Training], losses: Mapping[K, tuple[float, float]]) -> None:
    """Fail where a side has not trained, or where it should have come to the same loss and has not.

    That each one took all steps, it says by itself.
    """
    for name, (before, after) in losses.items():
        if not after < before:
            raise SystemExit(f"{name} has not trained: its loss was {before:.4f}, and is {after:.4f}.")
    expected: dict[Workload, float] = {}
    for name, one in trainings.items():
        if not one.work.is_deterministic or one.is_alone:
            continue
        loss = losses[name][1]
        first = expected.setdefault(replace(one.work, equality="close"), loss)
        if not math.isclose(loss, first, rel_tol=1e-5):
            raise SystemExit(f"{name} computes something else: its loss is {loss:.7f}, not {first:.7f}.")


def torchrun_variables(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Return what torchrun tells a process of one machine."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": str(port),
    }


def reserve_port(stack: ExitStack) -> int:
    """Return a port that nobody gets who asks for any, until the stack is closed.

    A socket is bound to it and does not listen, so that a program which is told it may. A port that was only
    seen to be free was another program's by the time that a side listened there.
    """
    bound = stack.enter_context(socket.socket())
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind(("127.0.0.1", 0))
    port: int = bound.getsockname()[1]
    return port
