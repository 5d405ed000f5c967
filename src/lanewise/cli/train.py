"""`lanewise train CONFIG`."""

from collections.abc import Sequence

from lanewise.config import load_config
from lanewise.config.class_path import add_search_path
from lanewise.jobs.start import run_command
from lanewise.jobs.train import TrainJob

_HELP = """\
usage: lanewise train CONFIG [--key.path value ...]

Trains as CONFIG says (.yaml, .json, .toml or .jsonnet). Any key can be overridden:

  lanewise train mnist.yaml --distributed.devices 4 --optimizer.init_args.lr 3e-4

Under torchrun or srun each process joins the others. Give a CONFIG with --help to see the arguments of its
classes.
"""


def train(arguments: Sequence[str]) -> int:
    """Run the subcommand and return the exit code."""
    wants_help = bool({"-h", "--help"} & set(arguments))
    arguments = [argument for argument in arguments if argument not in ("-h", "--help")]
    if not arguments:
        print(_HELP, end="")
        return 0 if wants_help else 2
    if wants_help:
        from lanewise.config.classes import describe_classes

        config = load_config(arguments[0], arguments[1:])
        add_search_path(config)
        print(_HELP + "\n" + describe_classes(config), end="")
        return 0
    run_command(TrainJob(load_config(arguments[0], arguments[1:])), show=lambda _: None)
    return 0
