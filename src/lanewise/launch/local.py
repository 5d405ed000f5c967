"""Starts the workers of one machine through torch's elastic agent, in this process."""

import logging
import os
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from lanewise.launch.failure import first_failure
from lanewise.lifeline import PARENT_PID_VARIABLE


def launch_local(
    arguments: Sequence[str],
    num_processes: int,
    variables: Mapping[str, str],
    *,
    folder: str,
    max_restarts: int = 0,
    signals: str,
) -> None:
    """Run `python ARGUMENTS` in several processes that form one world, and wait for all of them.

    The workers end when this process ends, whatever ends it.

    Args:
        arguments: command line of each worker.
        num_processes: workers to start.
        variables: added to the environment of the workers.
        folder: gets the agent's files, in which workers say why they failed; the caller removes it.
        max_restarts: how often all of them are started again when one fails.
        signals: those that end the workers and this call.

    Raises:
        LaunchError: what the first failing worker said.
        KeyboardInterrupt: on SIGINT; SystemExit: on SIGTERM, SIGHUP and SIGQUIT. The workers are gone then.
    """
    import signal

    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # What the agent logs of a failure is said better, and once, by the error raised here.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="127.0.0.1",
        max_restarts=max_restarts,
        logs_specs=DefaultLogsSpecs(log_dir=f"{folder}/agent"),
        signals_to_handle=signals,
    )
    try:
        with _environment({**variables, PARENT_PID_VARIABLE: str(os.getpid())}):
            elastic_launch(config, sys.executable)(*arguments)
    except ChildFailedError as error:
        raise first_failure(error.failures.items()) from None
    except SignalException as error:
        if error.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        raise SystemExit(128 + error.sigval) from None


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables, which the agent's workers inherit, and put the old ones back."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
