"""`lanewise verify CONFIG`."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from lanewise.cli.option import Syntax, read_arguments
from lanewise.config import load_config
from lanewise.config.check import expand_user
from lanewise.errors import ConfigError
from lanewise.world.environment import Environment

_HELP = """\
usage: lanewise verify CONFIG [--devices 1,2] [--steps 4] [--resume] [--json FILE] [--key.path value ...]

Proves on your own model and data that N devices compute what one computes, or says what differs, why, and
what to do about it. Runs a few steps on each number of devices, in `exact` whatever CONFIG says; nothing is
written to run_dir.

  --devices A,B    numbers of processes to compare with one; 1,2 if left out
  --steps N        steps to take, the last one of the first epoch and the next one among them; 4 if left out
  --resume         also go on from a checkpoint of another number of devices
  --json FILE      write the result there as well
"""

_SYNTAX = Syntax("verify", ("CONFIG",), ("--resume",), ("--devices", "--steps", "--json"), has_overrides=True)


def verify(arguments: Sequence[str]) -> int:
    """Run the subcommand and return the exit code: 1 if something differs."""
    given = read_arguments(arguments, _SYNTAX)
    if given.wants_help or not given.names:
        print(_HELP, end="")
        return 0 if given.wants_help else 2
    config_file, json_file = given.names[0], given.options.get("--json")
    devices = [_count("--devices", text) for text in given.options.get("--devices", "1,2").split(",")]
    num_steps = _count("--steps", given.options.get("--steps", "4"))
    if Environment.from_env(os.environ) is not None:
        raise ConfigError("verify starts its own processes: run it without torchrun or srun.")
    # The numbers of devices are those of --devices.
    config = load_config(config_file, [*given.overrides, "--distributed.devices=null"])

    from rich.console import Console

    from lanewise.verify.verify import verify as run

    console = Console(soft_wrap=True, highlight=False, width=None if sys.stdout.isatty() else 200)
    with Console(stderr=True).status("") as status:
        report = run(
            config,
            devices,
            num_steps=num_steps,
            resumes="--resume" in given.flags,
            show=lambda name: status.update(f"running {name}"),
        )
    console.print(f"{config_file}: {report.describe_steps()}\n", markup=False)
    console.print(report.table())
    console.print()
    for line in report.lines():
        console.print(line, markup=False)
    if json_file:
        Path(expand_user(json_file)).write_text(
            json.dumps(report.to_json(), indent=1) + "\n", encoding="utf-8"
        )
    return 0 if report.is_verified else 1


def _count(option: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"{option} must be a number from 1 on: got '{text}'.")
    return int(text)
