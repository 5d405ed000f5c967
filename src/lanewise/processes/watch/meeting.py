"""Where the processes of a world meet, in each start of it."""

import json
import math
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import final

import torch.distributed as dist

from lanewise.errors import WorldError
from lanewise.processes.watch.channel import Channel, named_ranks
from lanewise.processes.watch.store import OWN_STORE_VARIABLE, TimedStore
from lanewise.processes.world.environment import Environment

_SECONDS_BETWEEN_QUESTIONS = 0.1
_SECONDS_FOR_RANK_0 = 5.0
"""How much longer the others wait: rank 0 knows who did not come."""
_SECONDS_UNTIL_TOLD = 10.0
"""How long to wait without a word."""
_FOR_EVER = timedelta(days=1000)
_HINT = (
    f". If hosts came or went, rank 0 keeps another one: let every torchrun have {OWN_STORE_VARIABLE}=1, as "
    "python -m lanewise.launch.torchrun does"
)
_stores: dict[Environment, list[dist.TCPStore]] = {}
"""The store of each meeting of this process: a program may train several times, at the store of the first."""


@final
class Meeting:
    """Opens the store, and finds out which start this process belongs to.

    Args:
        environment: the place of this process, and of the store.
        keeps_store: whether this process keeps the store.
        timeout_seconds: how long to wait for the store, and for the others; None: for ever.

    Raises:
        WorldError: if there is no store in time, its port is in use, or rank 0 does not come.
    """

    def __init__(self, environment: Environment, timeout_seconds: float | None) -> None:
        self.environment = environment
        self._timeout_seconds = math.inf if timeout_seconds is None else timeout_seconds
        address, port = environment.master_address, environment.master_port
        keeper = "torchrun's agent" if environment.has_agent_store else "rank 0"
        self._place = f"{address}:{port}, which {keeper} keeps,"
        timeout = _FOR_EVER if timeout_seconds is None else timedelta(seconds=timeout_seconds)
        stores = _stores.setdefault(environment, [])
        open_store = partial(dist.TCPStore, address, port, wait_for_workers=False, timeout=timeout)
        # Who waits for ever was started by a launcher, which knows that the others come.
        self._quiet_until = math.inf if timeout_seconds is None else time.monotonic() + _SECONDS_UNTIL_TOLD
        telling = threading.Timer(_SECONDS_UNTIL_TOLD, self._tell, [[0]])  # torch's call blocks this thread
        telling.daemon = True
        if environment.rank and timeout_seconds is not None:
            telling.start()
        try:
            self._torchs = stores[0] if stores else open_store(is_master=environment.keeps_store)
        except dist.DistError as error:
            why = str(error).partition("\n")[0]
            raise WorldError(f"there is no store at {address}:{port}, where processes meet: {why}") from error
        finally:
            telling.cancel()
        self._store = TimedStore(self._torchs.clone(), self._place)  # type: ignore[attr-defined]
        self.channel = Channel(
            self._store,
            environment.world_size,
            environment.rank,
            is_local_rank_zero=environment.local_rank == 0,
            keeps_store=environment.keeps_store,
            start=self._arrive(),
        )
        stores.append(self._torchs)
        self._number = len(stores)

    @property
    def store(self) -> dist.Store:
        """The store of this start, for the collectives: without the addresses of an earlier one."""
        return dist.PrefixStore(f"{self.channel.start}/torch", self._torchs)

    def wait(self) -> bool:
        """Wait until all processes have come. Collective: every rank must call this.

        Returns:
            Whether an earlier start of the same launch may have begun the run; the same on every rank.

        Raises:
            WorldError: if some did not come in time; names them.
        """
        channel, deadline = self.channel, time.monotonic() + self._timeout_seconds
        if self.environment.rank > 0:
            deadline += _SECONDS_FOR_RANK_0
        if self.environment.rank == 0:
            keys = [f"{channel.start}/arrived/{rank}" for rank in range(channel.world_size)]
            while not self._store.has(*keys):
                missing = [rank for rank, key in enumerate(keys) if not self._store.has(key)]
                self._require_time(deadline, missing)
            is_restarted = channel.start > self._number or self._store.has(f"{channel.start}/restarted")
            self._store.set(f"{channel.start}/begun", json.dumps(is_restarted))
        while not self._store.has(f"{channel.start}/begun"):
            if self._store.add("starts", 0) > channel.start:  # this process had come to an earlier start
                channel.come_to(self._arrive())
            self._require_time(deadline, [0])
        channel.end_meeting()
        return self._store.get(f"{channel.start}/begun") == b"true"

    def agree(self, choose: Callable[[], str]) -> str:
        """Return what rank 0 chose, in the first start of a launch. Collective: every rank must call this."""
        deadline = time.monotonic() + self._timeout_seconds
        key = f"agreed/{self._number}"
        if self.environment.rank == 0 and not self._store.has(key):
            self._store.set(key, choose())
        while not self._store.has(key):
            self._require_time(deadline, [0])
        return self._store.get(key).decode()

    def _arrive(self) -> int:
        """Return the number of the start to which this process belongs.

        A start to which this rank has come before, or which has begun without it, is an earlier one. Torch's
        count of restarts is of no use here: it differs between hosts, and stays the same when a host joins.
        """
        if self.environment.rank == 0:
            number = self._store.add("starts")
            self._come(number)
            return number
        deadline = time.monotonic() + self._timeout_seconds
        while True:
            number = self._store.add("starts", 0)
            has_begun = not number or self._store.has(f"{number}/begun")
            if not has_begun and self._come(number) == 1:
                return number
            self._require_time(deadline, [0])

    def _come(self, number: int) -> int:
        """Come to a start, and say what is known of those before; return how often this rank has come."""
        if self.environment.is_restarted:
            self._store.set(f"{number}/restarted", "true")
        return self._store.add(f"{number}/arrived/{self.environment.rank}")

    def _require_time(self, deadline: float, missing: Sequence[int]) -> None:
        """Wait a moment for some ranks; raise WorldError where there is no time left."""
        if time.monotonic() > self._quiet_until:
            self._tell(missing)
        if time.monotonic() > deadline:
            raise WorldError(
                f"{named_ranks(missing)} did not come to the store at {self._place} within "
                f"distributed.start_seconds={self._timeout_seconds:g}."
            )
        time.sleep(_SECONDS_BETWEEN_QUESTIONS)

    def _tell(self, missing: Sequence[int]) -> None:
        """Say once, on each terminal, for whom and how long this process waits."""
        self._quiet_until = math.inf
        if self.environment.rank == self.environment.terminal:
            whom = named_ranks(missing) + ", which waits for all," * (self.environment.rank > 0)
            is_torchruns = self.environment.rank > 0 and self.environment.has_agent_store
            sys.stderr.write(
                f"rank {self.environment.rank} waits for {whom} at the store at {self._place} for up to "
                f"distributed.start_seconds={self._timeout_seconds:g}{_HINT * is_torchruns}\n"
            )
