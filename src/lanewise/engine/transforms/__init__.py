"""Changes to a user's model before the reducer gets it."""

from lanewise.engine.transforms.activation_checkpointing import (
    checkpoint_activations as checkpoint_activations,
)
from lanewise.engine.transforms.checkpointed import compare_runs as compare_runs
from lanewise.engine.transforms.compile import CompilationLog as CompilationLog
from lanewise.engine.transforms.compile import compile_forwards as compile_forwards
from lanewise.engine.transforms.sync_batch_norm import synchronise_batch_norm as synchronise_batch_norm
