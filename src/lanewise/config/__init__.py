"""What the user asked for: the configuration, read and checked without torch.

A key is a field, with a docstring, of its section's class. The class of a section stands in the file of its
name; the top level, batch, train, log, evaluate, checkpoint and integrity in `run`, compile in `memory`, and
ssh, slurm and kubernetes in `launchers`. A key that changes results is also in `identify` of
`engine/state/resume_check.py`, so that no run goes on with another value.

The modules that read files (`load`) and import the user's classes (`classes`) are not exported here: an own
loop needs neither, and their parsers take longer to import than all of this.
"""

from lanewise.config.class_path import ClassConfig as ClassConfig
from lanewise.config.data import DataConfig as DataConfig
from lanewise.config.data import MissingName as MissingName
from lanewise.config.distributed import Backend as Backend
from lanewise.config.distributed import CompressionName as CompressionName
from lanewise.config.distributed import DistributedConfig as DistributedConfig
from lanewise.config.distributed import Equality as Equality
from lanewise.config.distributed import FSDPConfig as FSDPConfig
from lanewise.config.init_from import InitFromConfig as InitFromConfig
from lanewise.config.memory import ActivationCheckpointingConfig as ActivationCheckpointingConfig
from lanewise.config.memory import CompileConfig as CompileConfig
from lanewise.config.memory import MemoryConfig as MemoryConfig
from lanewise.config.optimizer import OptimizerConfig as OptimizerConfig
from lanewise.config.orders import ORDERS as ORDERS
from lanewise.config.orders import OrderConfig as OrderConfig
from lanewise.config.pins import pin_environment as pin_environment
from lanewise.config.pins import pinned_variables as pinned_variables
from lanewise.config.reducers import ALONE as ALONE
from lanewise.config.reducers import DEFAULT_REDUCER as DEFAULT_REDUCER
from lanewise.config.reducers import REDUCERS as REDUCERS
from lanewise.config.reducers import ReducerKind as ReducerKind
from lanewise.config.reducers import ReducerName as ReducerName
from lanewise.config.run import MAY_DIFFER as MAY_DIFFER
from lanewise.config.run import BatchConfig as BatchConfig
from lanewise.config.run import CheckpointConfig as CheckpointConfig
from lanewise.config.run import ConsoleName as ConsoleName
from lanewise.config.run import EarlyStoppingConfig as EarlyStoppingConfig
from lanewise.config.run import EvaluateConfig as EvaluateConfig
from lanewise.config.run import EveryConfig as EveryConfig
from lanewise.config.run import IntegrityConfig as IntegrityConfig
from lanewise.config.run import LogConfig as LogConfig
from lanewise.config.run import PrecisionName as PrecisionName
from lanewise.config.run import RunConfig as RunConfig
from lanewise.config.run import TrainConfig as TrainConfig
from lanewise.config.scheduler import SchedulerConfig as SchedulerConfig
