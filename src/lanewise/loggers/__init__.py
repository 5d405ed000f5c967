"""Where the numbers and messages of a run go."""

from lanewise.loggers.build import build_loggers as build_loggers
from lanewise.loggers.phases import PhaseLog as PhaseLog
from lanewise.loggers.rank_log import RankLog as RankLog
