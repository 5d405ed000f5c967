"""Starts processes; the contract with those it starts is torchrun's environment.

`launcher.py` says what a new way to reach hosts needs.
"""

from lanewise.launch.agent import JobFiles as JobFiles
from lanewise.launch.agent import Streams as Streams
from lanewise.launch.agent import Workers as Workers
from lanewise.launch.fork_client import Fork as Fork
from lanewise.launch.fork_client import fork_client as fork_client
from lanewise.launch.launcher import Launcher as Launcher
from lanewise.launch.local import LocalLauncher as LocalLauncher
