"""What the user asked for: the configuration, read and checked without torch.

Stage two, which imports the user's classes, is `lanewise.config.classes`. It is left out here because its
parser takes longer to import than all of stage one.
"""

from lanewise.config.distributed import (
    Backend,
    DistributedConfig,
    Equality,
    FSDPConfig,
    ReducerName,
)
from lanewise.config.load import dump_config, load_config
from lanewise.config.override import Override
from lanewise.config.pins import pin_environment, pinned_variables
from lanewise.config.run import (
    MAY_DIFFER,
    BatchConfig,
    CheckpointConfig,
    ClassConfig,
    DataConfig,
    EvaluateConfig,
    EveryConfig,
    Mode,
    PrecisionName,
    RunConfig,
    TrainConfig,
)

__all__ = [
    "MAY_DIFFER",
    "Backend",
    "BatchConfig",
    "CheckpointConfig",
    "ClassConfig",
    "DataConfig",
    "DistributedConfig",
    "Equality",
    "EvaluateConfig",
    "EveryConfig",
    "FSDPConfig",
    "Mode",
    "Override",
    "PrecisionName",
    "ReducerName",
    "RunConfig",
    "TrainConfig",
    "dump_config",
    "load_config",
    "pin_environment",
    "pinned_variables",
]
