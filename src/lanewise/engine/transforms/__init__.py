"""Changes to a user's model before the reducer gets it."""

from lanewise.engine.transforms.activation_checkpointing import checkpoint_activations
from lanewise.engine.transforms.checkpointed import compare_runs
from lanewise.engine.transforms.compile import CompilationLog, compile_forwards
from lanewise.engine.transforms.sync_batch_norm import synchronise_batch_norm

__all__ = [
    "CompilationLog",
    "checkpoint_activations",
    "compare_runs",
    "compile_forwards",
    "synchronise_batch_norm",
]
