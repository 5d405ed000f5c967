"""Starts the workers on nodes of a Ray cluster that runs."""

import logging
import signal
import socket
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, final

from lanewise.errors import LaunchError
from lanewise.launch.launcher import count_processes
from lanewise.launch.remote import RemoteLauncher
from lanewise.launch.wire import CommandWire, Event, RemoteHost, Wire

_SECONDS_TO_PLACE = 300.0
"""How long the cluster may take to have room; it may add nodes meanwhile."""
_SECONDS_TO_ANSWER = 10.0
_CALLS_AT_ONCE = 5  # one of each method of `Wire`


@final
class _RayWire(Wire):
    """A wire through an actor.

    Args:
        actor: a `CommandWire` on the node. With it the process there ends.
    """

    remedy = "The nodes of the cluster need the lanewise of this machine in the environment of Ray's workers."

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._why = ""

    def send(self, line: bytes) -> None:
        self._call("send", line)

    def read(self) -> bytes:
        return self._call("read")  # type: ignore[no-any-return]

    def read_error(self) -> bytes:
        return self._call("read_error")  # type: ignore[no-any-return]

    def close(self) -> None:
        import ray

        with suppress(OSError):
            self._call("close")
        ray.kill(self._actor)

    def why_ended(self) -> str:
        with suppress(OSError):
            return str(self._call("why_ended"))
        return self._why

    def _call(self, name: str, *arguments: object) -> Any:
        """Call a method of the actor. Raises OSError where it is not there, or the process is not."""
        import ray

        try:
            return ray.get(getattr(self._actor, name).remote(*arguments))
        except ray.exceptions.RayError as error:
            self._why = f"Ray's actor is gone: {str(error).splitlines()[0].rstrip('.')}"
            raise OSError(self._why) from error


@final
@dataclass(kw_only=True)
class RayLauncher(RemoteLauncher):
    """Reaches each node by an actor, in a bundle of a placement group."""

    num_nodes: int
    num_processes: int
    """The workers of each node."""
    num_cores: int
    """The CPUs of each bundle."""
    num_gpus: int
    """The GPUs of each bundle."""
    takes_gpus: bool | None
    """Whether they are asked for; None: if the cluster has any."""
    _group: Any = field(default=None, init=False)

    @contextmanager
    def hosts(
        self, _names: Collection[str] | None = None
    ) -> Iterator[tuple[list[RemoteHost], "SimpleQueue[Event]"]]:
        with _connected():
            import ray
            from ray.util import placement_group, remove_placement_group

            has_gpus = "GPU" in ray.cluster_resources()
            bundle = self._bundle(takes_gpus=has_gpus if self.takes_gpus is None else self.takes_gpus)
            self._group = placement_group([bundle] * self.num_nodes, strategy=self._strategy)
            try:
                if not self._group.wait(_SECONDS_TO_PLACE):
                    raise LaunchError(
                        f"the Ray cluster had no room for {self._what(bundle)} within "
                        f"{_SECONDS_TO_PLACE:g} s. `ray status` shows what it has: add nodes, or let the run "
                        "need less."
                    )
                with super().hosts() as found:
                    yield found
            finally:
                remove_placement_group(self._group)

    def connect(self, _names: Collection[str] | None = None) -> list[tuple[str, int, Wire]]:
        import ray
        from ray.util import placement_group_table
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        node_of = placement_group_table(self._group)["bundles_to_node_id"]
        names = {node["NodeID"]: node["NodeManagerHostname"] for node in ray.nodes()}
        bundle = self._group.bundle_specs[0]
        carrier = ray.remote(CommandWire)  # whose default command is evaluated on the node
        return [
            (
                names[node_of[index]],
                self.num_processes,
                _RayWire(
                    carrier.options(
                        num_cpus=bundle["CPU"],
                        num_gpus=bundle.get("GPU", 0),
                        max_concurrency=_CALLS_AT_ONCE,
                        scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, index),
                    ).remote("")
                ),
            )
            for index in range(self.num_nodes)
        ]

    def describe(self) -> str:
        what = self._what(self._bundle(takes_gpus=self.takes_gpus is True))
        gpus = f", and with GPU {self.num_gpus} if the cluster has GPUs" if self.takes_gpus is None else ""
        number = count_processes(self.num_processes)
        return f"a placement group of {what}{gpus}; in each an actor with {number} in {self.project}"

    def _what(self, bundle: Mapping[str, float]) -> str:
        resources = " and ".join(f"{name} {number:g}" for name, number in bundle.items())
        return f"{self.num_nodes} bundle{'s' * (self.num_nodes != 1)} of {resources}, {self._strategy}"

    @property
    def _strategy(self) -> str:
        return "STRICT_SPREAD" if self.num_nodes > 1 else "PACK"

    def _bundle(self, *, takes_gpus: bool) -> dict[str, float]:
        return {"CPU": self.num_cores, **({"GPU": self.num_gpus} if takes_gpus else {})}


@contextmanager
def _connected() -> Iterator[None]:
    """Connect this process to the cluster, unless it is connected.

    Raises:
        LaunchError: there is no cluster, or no Ray here.
    """
    with _keeping_signals():
        try:
            import ray
        except ImportError as error:
            raise LaunchError(
                f"distributed.launcher ray needs Ray, which cannot be imported: {error}. "
                "Install it: pip install 'lanewise[ray]'."
            ) from None
        is_ours = not ray.is_initialized()
        if is_ours:
            try:
                ray.init(address=_address(), logging_level=logging.WARNING, log_to_driver=False)
            except (OSError, RuntimeError, ValueError) as error:
                raise LaunchError(
                    f"no Ray cluster can be reached: {str(error).rstrip('.')}. Start one (ray start --head), "
                    "or set RAY_ADDRESS."
                ) from None
    try:
        yield
    finally:
        if is_ours:
            with _keeping_signals():
                ray.shutdown()


def _address() -> str:
    """Return where the cluster is. Raises OSError where nobody answers, as Ray would ask for ever."""
    from ray._private.services import get_ray_address_from_environment

    address: str = get_ray_address_from_environment("auto", None)
    host, _, port = address.rpartition(":")
    if "//" not in host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=_SECONDS_TO_ANSWER).close()
    return address


@contextmanager
def _keeping_signals() -> Iterator[None]:
    """Keep the handler of SIGTERM, which Ray takes for itself."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
