"""Torch's elastic agent, with workers that are forks of a server instead of new interpreters."""

import signal
import socket
import time
import uuid
from collections.abc import Mapping
from typing import Any

from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.elastic.agent.server.api import WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsSpecs, PContext
from torch.distributed.elastic.multiprocessing.api import RunProcsResult
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo

from lanewise.launch.fork_server import Fork, ForkServer


class ForkingAgent(LocalElasticAgent):
    """Keeps torch's rendezvous, watching and restarts; only how workers start is its own.

    Args:
        server: what workers are forked from.
        environment: theirs, but for what tells each its rank.
        spec: see torch.
        logs_specs: see torch.
    """

    def __init__(
        self, server: ForkServer, environment: Mapping[str, str], spec: Any, logs_specs: LogsSpecs
    ) -> None:
        super().__init__(spec, logs_specs)
        self._server = server
        self._environment = environment
        self._logs = logs_specs

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Start the workers, with the variables that torchrun documents, and return their process ids."""
        spec = worker_group.spec
        shared = {
            "MASTER_ADDR": worker_group.master_addr,
            "MASTER_PORT": worker_group.master_port,
            "LOCAL_WORLD_SIZE": spec.local_world_size,
            "GROUP_RANK": worker_group.group_rank,
            "GROUP_WORLD_SIZE": worker_group.group_world_size,
            "ROLE_NAME": spec.role,
            "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
            "TORCHELASTIC_MAX_RESTARTS": spec.max_restarts,
            "TORCHELASTIC_RESTART_COUNT": spec.max_restarts - self._remaining_restarts,
            "TORCHELASTIC_USE_AGENT_STORE": spec.rdzv_handler.use_agent_store,
        }
        environments = {
            worker.local_rank: {
                **self._environment,
                **{name: str(value) for name, value in shared.items()},
                "RANK": str(worker.global_rank),
                "LOCAL_RANK": str(worker.local_rank),
                "WORLD_SIZE": str(worker.world_size),
                "ROLE_RANK": str(worker.role_rank),
                "ROLE_WORLD_SIZE": str(worker.role_world_size),
            }
            for worker in worker_group.workers
        }
        self._pcontext = _Forks(self._server, str(spec.entrypoint), spec.args, environments, self._logs)
        self._pcontext.start()
        return self._pcontext.pids()


class OneHost(RendezvousHandler):
    """Meets nobody: all workers are of one agent, whose store they use.

    Torch's own handlers look through every module that is loaded at each step of the meeting, to write
    where it was called from; in a process with many that takes longer than starting the workers.
    """

    _ADDRESS = "127.0.0.1"

    def __init__(self) -> None:
        self._id = uuid.uuid4().hex
        listener = socket.create_server((self._ADDRESS, 0))  # torch's own would listen on every address
        self._store = TCPStore(
            self._ADDRESS,
            listener.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )

    use_agent_store = True

    def get_backend(self) -> str:
        """See torch."""
        return "one-host"

    def next_rendezvous(self) -> RendezvousInfo:
        """See torch."""
        place = RendezvousStoreInfo(self._ADDRESS, self._store.port)
        return RendezvousInfo(
            PrefixStore(self._id, self._store), rank=0, world_size=1, bootstrap_store_info=place
        )

    def is_closed(self) -> bool:
        """See torch."""
        return False

    def set_closed(self) -> None:
        """See torch."""

    def num_nodes_waiting(self) -> int:
        """See torch."""
        return 0

    def get_run_id(self) -> str:
        """See torch."""
        return self._id

    def shutdown(self) -> bool:
        """See torch."""
        return True


class _Forks(PContext):
    """The workers of one machine, by local rank.

    Args:
        server: what they are forked from.
        module: each does what `python -m MODULE ARGUMENTS` does.
        arguments: what follows the module.
        environments: the environment of each.
        logs_specs: where each says why it failed.
    """

    def __init__(
        self,
        server: ForkServer,
        module: str,
        arguments: tuple[str, ...],
        environments: dict[int, dict[str, str]],
        logs_specs: LogsSpecs,
    ) -> None:
        super().__init__(module, module, dict.fromkeys(environments, arguments), environments, logs_specs)
        self._server = server
        self._module = module
        self._arguments = arguments
        self._forks: dict[int, Fork] = {}

    def pids(self) -> dict[int, int]:
        """See torch."""
        return {rank: fork.pid for rank, fork in self._forks.items()}

    def _start(self) -> None:
        for rank, environment in self.envs.items():
            variables = {**environment, "TORCHELASTIC_ERROR_FILE": self.error_files[rank]}
            self._forks[rank] = self._server.run(self._module, self._arguments, environment=variables)

    def _poll(self) -> RunProcsResult | None:
        """Say how all of them ended, if all have or one failed; then end the others."""
        codes = [fork.poll() for fork in self._forks.values()]
        if None in codes and not any(codes):
            return None
        self.close()
        failures = {
            rank: ProcessFailure(rank, fork.pid, code, self.error_files[rank])
            for rank, fork in self._forks.items()
            if (code := fork.poll())
        }
        return RunProcsResult(dict.fromkeys(self._forks), failures, self.stdouts, self.stderrs)

    def _close(self, death_sig: signal.Signals, timeout: int = 30) -> None:
        deadline = time.monotonic() + timeout
        for sign in (death_sig, signal.SIGKILL):
            for fork in self._forks.values():
                fork.send_signal(sign)
            for fork in self._forks.values():
                fork.wait(max(0.0, deadline - time.monotonic()))
            deadline = time.monotonic() + timeout
