"""Starts the workers of one machine: forks of a server, which torch's elastic agent looks after."""

import logging
import os
import signal

from lanewise.launch.failure import first_failure
from lanewise.launch.fork_server import fork_server
from lanewise.launch.launcher import LAUNCHER_PID_VARIABLE, Workers

_SECONDS_BETWEEN_LOOKS = 0.03
_SIGNALS_VARIABLE = "TORCHELASTIC_SIGNALS_TO_HANDLE"
"""Environment variable by which torch's agent is told which signals end it."""


class LocalLauncher:
    """Starts workers on this machine; see `Launcher`."""

    def launch(self, workers: Workers) -> None:
        """See `Launcher`."""
        from torch.distributed.elastic.agent.server.api import WorkerSpec
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException

        from lanewise.launch.agent import ForkingAgent, OneHost

        # What the agent logs of a failure is said better, and once, by the error raised here.
        for name in ("elastic", "elastic.agent.server.api"):  # which has a level of its own
            logging.getLogger(f"torch.distributed.{name}").setLevel(logging.CRITICAL)
        (host,) = workers.hosts
        spec = WorkerSpec(
            role="worker",
            local_world_size=host.num_processes,
            rdzv_handler=OneHost(),
            entrypoint=workers.module,
            args=tuple(workers.arguments),
            max_restarts=workers.max_restarts,
            monitor_interval=_SECONDS_BETWEEN_LOOKS,
        )
        environment = {**os.environ, **workers.variables, LAUNCHER_PID_VARIABLE: str(os.getpid())}
        logs = DefaultLogsSpecs(log_dir=f"{workers.folder}/agent")
        server = fork_server(workers.variables)
        agent = ForkingAgent(server, environment, spec, logs)
        before = os.environ.get(_SIGNALS_VARIABLE)
        os.environ[_SIGNALS_VARIABLE] = workers.signals
        try:
            result = agent.run()
        except SignalException as error:
            if error.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise SystemExit(128 + error.sigval) from None
        finally:
            if before is None:
                del os.environ[_SIGNALS_VARIABLE]
            else:
                os.environ[_SIGNALS_VARIABLE] = before
        if result.is_failed():
            server.require_running()
            raise first_failure(result.failures.items())
