"""What the user asked for: the configuration, read and checked without torch.

What reads files (`load`, `override`) and imports the user's classes (`classes`) is left out here: an own loop
needs neither, and their parsers take longer to import than all of this.
"""

from lanewise.config.class_config import ClassConfig
from lanewise.config.data import ORDERS, DataConfig, OrderConfig
from lanewise.config.distributed import (
    Backend,
    CompressionName,
    DistributedConfig,
    Equality,
    FSDPConfig,
    ReducerName,
)
from lanewise.config.memory import ActivationCheckpointingConfig, CompileConfig, MemoryConfig
from lanewise.config.pins import pin_environment, pinned_variables
from lanewise.config.run import (
    MAY_DIFFER,
    BatchConfig,
    CheckpointConfig,
    EarlyStoppingConfig,
    EvaluateConfig,
    EveryConfig,
    LogConfig,
    Mode,
    PrecisionName,
    RunConfig,
    TrainConfig,
    powersgd_meets_no_overflow,
)
from lanewise.config.scheduler import SchedulerConfig

__all__ = [
    "MAY_DIFFER",
    "ORDERS",
    "ActivationCheckpointingConfig",
    "Backend",
    "BatchConfig",
    "CheckpointConfig",
    "ClassConfig",
    "CompileConfig",
    "CompressionName",
    "DataConfig",
    "DistributedConfig",
    "EarlyStoppingConfig",
    "Equality",
    "EvaluateConfig",
    "EveryConfig",
    "FSDPConfig",
    "LogConfig",
    "MemoryConfig",
    "Mode",
    "OrderConfig",
    "PrecisionName",
    "ReducerName",
    "RunConfig",
    "SchedulerConfig",
    "TrainConfig",
    "pin_environment",
    "pinned_variables",
    "powersgd_meets_no_overflow",
]
