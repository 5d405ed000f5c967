"""Where the numbers and messages of a run go."""

from lanewise.runs.loggers.build import build_loggers as build_loggers
from lanewise.runs.loggers.phases import PhaseLog as PhaseLog
from lanewise.runs.loggers.rank_log import RankLog as RankLog
