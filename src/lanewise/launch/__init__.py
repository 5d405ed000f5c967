"""Starts processes; the contract with those it starts is torchrun's environment."""

from lanewise.launch.failure import ERROR_FILE_VARIABLE, has_agent, record_failure
from lanewise.launch.fork_server import Fork, fork_server, preload
from lanewise.launch.launcher import LAUNCHER_PID_VARIABLE, Host, Launcher, Workers
from lanewise.launch.local import LocalLauncher

__all__ = [
    "ERROR_FILE_VARIABLE",
    "LAUNCHER_PID_VARIABLE",
    "Fork",
    "Host",
    "Launcher",
    "LocalLauncher",
    "Workers",
    "fork_server",
    "has_agent",
    "preload",
    "record_failure",
]
