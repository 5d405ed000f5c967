"""Where the numbers and messages of a run go."""

from lanewise.loggers.audit import AuditLog
from lanewise.loggers.jsonl import JsonlLogger
from lanewise.loggers.progress import ProgressLogger
from lanewise.loggers.rank_log import RankLog
from lanewise.loggers.tensorboard import TensorBoardLogger

__all__ = ["AuditLog", "JsonlLogger", "ProgressLogger", "RankLog", "TensorBoardLogger"]
