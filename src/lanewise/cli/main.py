"""Finds the subcommand and turns errors into messages and exit codes.

Everything else is imported late, so that `lanewise --help` takes little more than the start of Python.
"""

import io
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lanewise.cli.arguments import Command

_HELP = """\
usage: lanewise COMMAND ...

Trains a PyTorch model on any number of devices and gets the same model.

commands:
{commands}

options:
  --help       show this; after a command, what it takes
  --version    show the version

Exit codes: 0 done, 1 failed, 2 a mistake in what was asked for, 75 stopped
after saving a checkpoint (SIGTERM, SIGUSR1, SIGUSR2 or Ctrl-C), 130 interrupted
by a second Ctrl-C.
"""

_WIDTH_OF_COMMANDS = 105
"""The width of the widest line with a command and its purpose."""

COMMANDS = {
    "init": ("[DIR] [--from mnist]", "make a small project to begin with"),
    "train": ("CONFIG [--key.path value ...]", "train as the configuration says"),
    "evaluate": ("RUN_OR_MODEL [--key value]", "evaluate a trained model"),
    "predict": ("RUN_OR_MODEL --output FILE", "write what a trained model predicts"),
    "verify": ("CONFIG --devices 1,2", "prove that devices compute the same, or say why not"),
    "plan": ("CONFIG --devices 1,2,4", "say what memory a run needs, and what it sends, before it"),
    "bench": ("CONFIG --devices 1,2", "measure every mode, and say what bounds it"),
    "runs": ("[DIR]", "list runs: the state of each, and how to resume it"),
    "report": ("RUN ... --output FILE.html", "write a page about runs, with charts"),
    "audit": ("RUN", "check that every sample was trained once, where it was planned"),
    "replay": ("RUN --step N [--lane N]", "take a step of a run again, and compare it"),
    "diff": ("RUN_A RUN_B", "find where two runs part, and why"),
    "checkpoints": ("RUN", "list the checkpoints of a run, and verify them"),
    "export": ("RUN_OR_CHECKPOINT --output F", "write the weights of a checkpoint"),
    "schema": ("", "print the JSON schema of a configuration"),
    "completion": ("SHELL", "print a script that completes commands in a shell"),
}
"""The usual form of each, and its purpose; `COMMAND` in the module of that name declares the rest."""
_LOCAL_RANK = ("--local-rank=", "--local_rank=")
"""What `python -m torch.distributed.launch` and DeepSpeed's launcher put before a program's arguments."""
_JUDGES = ("audit", "diff", "replay")
"""The commands of which exit code 1 says that something differs, so that what fails exits with 2."""
_JOIN = ("train", "evaluate", "predict")
"""The commands that run in a world which torchrun, srun or mpirun prepared."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: without the program's name; `sys.argv[1:]` if None.

    Returns:
        The exit code.
    """
    _open_standard_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr's: a file may have any name
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _show
    given = list(sys.argv[1:] if arguments is None else arguments)
    is_judge = given[:1] and given[0] in _JUDGES
    try:
        code = _run(given)
        sys.stdout.flush()
    except Exception as raised:
        error = _refusal() if isinstance(raised, OSError) else None
        if isinstance(error, BrokenPipeError):  # as `lanewise runs | head` ends it: nobody reads any more
            return 128 + signal.SIGPIPE
        if error is not None:
            print(f"error: the output cannot be written: {error.strerror}.", file=sys.stderr)
        elif is_judge:
            _show(type(raised), raised, raised.__traceback__)
        else:
            raise
        return 2 if is_judge else 1
    return code


def _run(given: list[str]) -> int:
    if given and given[0].startswith(_LOCAL_RANK):
        del given[0]  # LOCAL_RANK says it as well
    name, *rest = given or ["--help"]
    if name in ("-h", "--help"):
        import shutil

        is_wide = shutil.get_terminal_size().columns >= _WIDTH_OF_COMMANDS
        between = "  " if is_wide else "\n      "
        lines = [
            f"  {f'{name} {form}'.rstrip():<{37 if is_wide else 0}}{between}{purpose}"
            for name, (form, purpose) in COMMANDS.items()
        ]
        print(_HELP.format(commands="\n".join(lines)), end="")
        return 0
    if name == "--version":
        from importlib.metadata import version

        print(version("lanewise"))
        return 0
    from lanewise.errors import LanewiseError, PreemptedError, mistakes_of, plain_lines, wrapped

    try:
        from lanewise.cli.arguments import read_arguments

        command = find_command(name)
        found = read_arguments(command, rest)
        if found.wants_help:
            from lanewise.cli.help import write_help

            print(write_help(command, found), end="")
            return 0
        return command.run(found)
    except PreemptedError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except LanewiseError as error:
        if name in _JOIN:
            from lanewise.commands.jobs.rank import fail_in_prepared_world

            fail_in_prepared_world(error)
        for mistake in mistakes_of(error):
            print(wrapped(plain_lines(f"error: {mistake}"), sys.stderr), file=sys.stderr)
        if not rest and COMMANDS.get(name, ("",))[0][:1] not in {"", "["}:  # it needs something
            from lanewise.cli.help import write_usage

            print(write_usage(find_command(name)), file=sys.stderr)
        return 2 if name in _JUDGES else error.exit_code
    except KeyboardInterrupt as error:
        print(": ".join(["interrupted", *map(str, error.args)]), file=sys.stderr)
        return 130


def _refusal() -> OSError | None:
    """Return why the standard output cannot be written, and discard what python would write at its end."""
    try:
        print(flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return error
    return None


def _show(_kind: object, error: BaseException, _traceback: object) -> None:
    """Print an error that is not caught, of the user's code or a bug of ours; a debugger gets it first."""
    from lanewise.errors import traceback_of

    print(traceback_of(error), file=sys.stderr)


def find_command(name: str) -> "Command":
    """Import a subcommand.

    Raises:
        ConfigError: there is none of this name.
    """
    if name in COMMANDS:
        command: Command = import_module(f"lanewise.cli.{name}").COMMAND
        return command
    from lanewise.config.check import suggest
    from lanewise.errors import ConfigError

    raise ConfigError(
        f"{name} is not a command of lanewise. {suggest(name, [*COMMANDS, '--help', '--version'])}"
    )


def _open_standard_streams() -> None:
    """Discard what is written to a closed stdout or stderr, here and in processes that are started.

    Otherwise the next file that is opened would get its file descriptor.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
            os.set_inheritable(opened, number == opened)
            stream = open(  # noqa: SIM115 - for as long as the process lives
                opened, "r" if number == 0 else "w", encoding="utf-8", closefd=False
            )
            setattr(sys, name, stream)
