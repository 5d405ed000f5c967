"""The servers from which tests fork worlds and command lines."""

from collections.abc import Mapping

from lanewise.launch import fork_server

_MODULES = (
    "pytest",
    "lanewise.testing",
    "lanewise.cli.train",
    "lanewise.config.classes",
    "lanewise.launch.agent",
    "lanewise.loggers",
    "lanewise.verify.verify",
    "torch.utils.tensorboard",
    "torchmetrics.classification",  # three seconds, since it imports transformers and matplotlib
    "torchmetrics.retrieval",
    "transformers.models.bert.modeling_bert",
    "transformers.models.gpt2.modeling_gpt2",
    "docstring_parser",
)
"""What none of the forks needs to import any more; what is not installed is left out."""


def warm_up(variables: Mapping[str, str]) -> None:
    """Start the server of an environment, as `fork_server` says, and let it import what tests need."""
    fork_server(variables).preload(*_MODULES)
