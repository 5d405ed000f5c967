"""Starts processes; the contract with those it starts is torchrun's environment."""

from lanewise.launch.failure import has_agent as has_agent
from lanewise.launch.failure import record_failure as record_failure
from lanewise.launch.fork_server import Fork as Fork
from lanewise.launch.fork_server import fork_server as fork_server
from lanewise.launch.launcher import Launcher as Launcher
from lanewise.launch.launcher import Streams as Streams
from lanewise.launch.launcher import Workers as Workers
from lanewise.launch.local import LocalLauncher as LocalLauncher
