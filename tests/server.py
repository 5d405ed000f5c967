"""The one server from which tests fork worlds and command lines, also where xdist runs them in workers."""

import atexit
import os
import socket
import threading
from pathlib import Path

from lanewise.launch import fork_client, fork_server

OF_RUNS = (
    "lanewise.cli.main",
    "lanewise.commands.jobs.train",
    "lanewise.commands.verify.verify",
    "lanewise.config.classes",
    "lanewise.data.audit",
    "lanewise.processes.device.allocator",
    "lanewise.processes.watch.watch",
    "lanewise.runs.loggers",
    "rich._emoji_codes",
    "tests.light",
    "tests.parsers",
    "attrs",  # which jsonargparse imports when it reads the first class
    "docstring_parser",
    "jsonargparse",
    "torch.profiler._cupti_monitor",
)
"""What no run needs to import any more; what is not installed is left out."""
_MODULES = (
    "tests.other_servers",  # the first, so that they import at the same time
    *OF_RUNS,
    "pytest",
    "lanewise.testing",
    "lanewise.cli.train",
    "lanewise.data.parquet",
    "lanewise.engine.own_loop.join",
    "tensorboard.compat.proto.event_pb2",
    "transformers.models.bert.modeling_bert",
    "transformers.models.gpt2.modeling_gpt2",
    "lanewise.hugging_face",
    "lightning",
    "lanewise.lightning",
    "pandas",  # which pyarrow imports when it makes the first table
    "pyarrow.pandas_compat",
    "pyarrow.parquet",
)
"""What none of the forks needs to import any more."""


def start() -> None:
    """Start the server of this environment, and let it import what tests need."""
    fork_client({}).preload(*_MODULES)


def share(address: Path) -> None:
    """Let one other process join the server."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(address))
    listener.listen()

    def hand_over() -> None:
        with listener, listener.accept()[0] as connection:
            socket.send_fds(connection, [b"channel"], [fork_client({})._channel.fileno()])

    threading.Thread(target=hand_over, daemon=True).start()


def join(address: Path) -> None:
    """Take the server that another process shares, as a fork takes the one that it comes from."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(address))
        _, (channel,), _, _ = socket.recv_fds(connection, len(b"channel"), 1)
    fork_server.channel, fork_server.started_with = socket.socket(fileno=channel), dict(os.environ)
    atexit.register(fork_server.channel.close)
