"""Finds the subcommand and turns errors into messages and exit codes; imports each subcommand late."""

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from lanewise.config.check import suggest
from lanewise.errors import ConfigError, LanewiseError, PreemptedError, mistakes_of

_HELP = """\
usage: lanewise COMMAND ...

Trains a PyTorch model on any number of devices and gets the same model.

commands:
  train CONFIG [--key.path value ...]    train as the configuration says
  train CONFIG --help                    show the arguments of its classes
  evaluate RUN_OR_MODEL [--key value]    evaluate a trained model
  verify CONFIG --devices 1,2            prove that devices compute the same, or say why not
  audit RUN                              check that every sample was trained once, where it was planned
  checkpoints RUN                        list the checkpoints of a run, and verify them
  export RUN_OR_CHECKPOINT --output F    write the weights of a checkpoint

options:
  --help       show this
  --version    show the version

Exit codes: 0 done, 1 failed, 2 a mistake in what was asked for, 75 stopped by SIGTERM or SIGUSR1 after saving
a checkpoint, 130 interrupted.
"""


_COMMANDS = ("train", "evaluate", "verify", "audit", "checkpoints", "export")
"""Each is a function of its name, in a module of its name beside this one."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: without the program's name; `sys.argv[1:]` if None.

    Returns:
        The exit code.
    """
    _open_standard_streams()
    command, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if command in ("-h", "--help"):
        print(_HELP, end="")
        return 0
    if command == "--version":
        from importlib.metadata import version

        print(version("lanewise"))
        return 0
    try:
        if command not in _COMMANDS:
            raise ConfigError(f"{command} is no command of lanewise. {suggest(command, _COMMANDS)}")
        run: Callable[[Sequence[str]], int] = getattr(import_module(f"lanewise.cli.{command}"), command)
        return run(rest)
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


def _open_standard_streams() -> None:
    """Let what is written to a closed stdout or stderr go nowhere, here and in processes that are started.

    Otherwise the next file that is opened gets its number.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
            os.set_inheritable(opened, number == opened)
            stream = open(  # noqa: SIM115 - for as long as the process lives
                opened, "r" if number == 0 else "w", encoding="utf-8", closefd=False
            )
            setattr(sys, name, stream)
