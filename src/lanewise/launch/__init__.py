"""Starts processes; the contract with those it starts is torchrun's environment."""

from lanewise.launch.failure import has_agent, record_failure
from lanewise.launch.local import launch_local

__all__ = ["has_agent", "launch_local", "record_failure"]
