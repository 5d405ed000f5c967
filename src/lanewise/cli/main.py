"""Finds the subcommand and turns errors into messages and exit codes; imports each subcommand late."""

import sys
from collections.abc import Sequence

from lanewise.errors import LanewiseError, PreemptedError, mistakes_of

_HELP = """\
usage: lanewise COMMAND ...

Trains a PyTorch model on any number of devices and gets the same model.

commands:
  train CONFIG [--key.path value ...]    train as the configuration says
  train CONFIG --help                    show the arguments of its classes
  evaluate RUN_OR_MODEL [--key value]    evaluate a trained model

options:
  --help       show this
  --version    show the version

Exit codes: 0 done, 1 failed, 2 a mistake in what was asked for, 75 stopped by SIGTERM or SIGUSR1 after saving
a checkpoint, 130 interrupted.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: without the program's name; `sys.argv[1:]` if None.

    Returns:
        The exit code.
    """
    command, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if command in ("-h", "--help"):
        print(_HELP, end="")
        return 0
    if command == "--version":
        from importlib.metadata import version

        print(version("lanewise"))
        return 0
    try:
        if command == "train":
            from lanewise.cli.train import train

            return train(rest)
        if command == "evaluate":
            from lanewise.cli.evaluate import evaluate

            return evaluate(rest)
        print(f"error: {command} is no command of lanewise. Use: train, evaluate.", file=sys.stderr)
        return 2
    except PreemptedError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except LanewiseError as error:
        for mistake in mistakes_of(error):
            print(f"error: {mistake}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
