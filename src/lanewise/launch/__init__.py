"""Starts processes; the contract with those it starts is torchrun's environment."""

from lanewise.launch.fork_server import Fork as Fork
from lanewise.launch.fork_server import fork_server as fork_server
from lanewise.launch.local import Streams as Streams
from lanewise.launch.local import Workers as Workers
from lanewise.launch.local import launch_workers as launch_workers
