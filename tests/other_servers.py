"""Starts servers for the two other environments of runs, so that no fork of the tests' server starts its own.

Which is imported in that server: its forks find them where they look for servers that they have started.
"""

import os
import signal

from lanewise.config import pinned_variables
from lanewise.launch.fork_client import PRELOAD, ForkClient, _read_at_start, _servers
from lanewise.launch.fork_server import _IGNORED
from tests.server import OF_RUNS


def start(variables: dict[str, str]) -> None:
    """Start a server whose environment has other pins."""
    pins = pinned_variables(1, "exact")
    environment = {name: value for name, value in os.environ.items() if name not in pins} | variables
    server = ForkClient.start(environment, PRELOAD)
    server.preload(*OF_RUNS)
    _servers[_read_at_start(environment)] = ForkClient(server._channel)


# They would ignore what this server ignores.
ignored = {sign: signal.signal(sign, signal.SIG_DFL) for sign in _IGNORED}
start(pinned_variables(1, "close"))
start({**pinned_variables(1, "exact"), "PYTHONHASHSEED": "1"})  # of the run that verify repeats
for sign, handler in ignored.items():
    signal.signal(sign, handler)
