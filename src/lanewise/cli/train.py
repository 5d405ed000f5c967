"""`lanewise train CONFIG`."""

from collections.abc import Sequence

from lanewise.cli.option import Syntax, read_arguments
from lanewise.config import MAY_DIFFER, load_config
from lanewise.config.class_path import add_search_path
from lanewise.errors import ConfigError
from lanewise.jobs.start import run_command
from lanewise.jobs.train import TrainJob

_HELP = """\
usage: lanewise train CONFIG [--key.path value ...]

Trains as CONFIG says (.yaml, .json, .toml or .jsonnet). Any key can be overridden:

  lanewise train mnist.yaml --distributed.devices 4 --optimizer.init_args.lr 3e-4

  --resume           go on from the newest good checkpoint in run_dir, if there is one
  --allow A,B        with --resume: go on although the checkpoint has other lanes, dataset, seed,
                     max_grad_norm or ema_decay
  --audit            write the sample indices and a hash of the tensors of every lane, for `lanewise audit`

Under torchrun or srun each process joins the others. Give a CONFIG with --help to see the arguments of its
classes.
"""


_SYNTAX = Syntax("train", ("CONFIG",), ("--resume", "--audit"), ("--allow",), has_overrides=True)


def train(arguments: Sequence[str]) -> int:
    """Run the subcommand and return the exit code."""
    given = read_arguments(arguments, _SYNTAX)
    if not given.names:
        print(_HELP, end="")
        return 0 if given.wants_help else 2
    config = load_config(given.names[0], given.overrides)
    if given.wants_help:
        from lanewise.config.classes import describe_classes

        add_search_path(config)
        print(_HELP + "\n" + describe_classes(config), end="")
        return 0
    is_resumed, allow = "--resume" in given.flags, given.options.get("--allow")
    names = () if allow is None else tuple(allow.split(","))
    if any(name not in MAY_DIFFER for name in names):
        raise ConfigError(f"--allow must list what may differ, out of {', '.join(MAY_DIFFER)}: got {allow}.")
    if names and not is_resumed:
        raise ConfigError("--allow says what may differ on resume: add --resume, or leave it out.")
    job = TrainJob(config, is_resumed=is_resumed, allow=names, is_audited="--audit" in given.flags)
    run_command(job, show=lambda _: None)
    return 0
