"""What is done to a user's model before the reducer gets it."""

from lanewise.transforms.activation_checkpointing import checkpoint_activations
from lanewise.transforms.compile import CompilationLog, compile_forwards

__all__ = ["CompilationLog", "checkpoint_activations", "compile_forwards"]
