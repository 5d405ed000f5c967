"""Sinks of what a run reports."""

from lanewise.loggers.jsonl import JsonlLogger
from lanewise.loggers.logger import Logger
from lanewise.loggers.progress import ProgressLogger
from lanewise.loggers.rank_log import log_to

__all__ = ["JsonlLogger", "Logger", "ProgressLogger", "log_to"]
