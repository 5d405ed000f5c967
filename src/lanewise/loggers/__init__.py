"""Where the numbers and messages of a run go."""

from lanewise.loggers.audit import AuditLog as AuditLog
from lanewise.loggers.jsonl import JsonlLogger as JsonlLogger
from lanewise.loggers.progress import ProgressLogger as ProgressLogger
from lanewise.loggers.rank_log import RankLog as RankLog
from lanewise.loggers.tensorboard import TensorBoardLogger as TensorBoardLogger
