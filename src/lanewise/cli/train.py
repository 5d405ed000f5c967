"""`lanewise train CONFIG`."""

from collections.abc import Sequence

from lanewise.cli.option import take_option
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
  --allow A,B        with --resume: go on although the checkpoint has other lanes, dataset or seed
  --audit            write the sample indices and a hash of the tensors of every lane, for `lanewise audit`

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
    is_resumed, is_audited = "--resume" in arguments, "--audit" in arguments
    arguments = [argument for argument in arguments if argument not in ("--resume", "--audit")]
    allow, arguments = _take_allow(arguments)
    if allow and not is_resumed:
        raise ConfigError("--allow says what may differ on resume: add --resume, or leave it out.")
    config = load_config(arguments[0], arguments[1:])
    job = TrainJob(config, is_resumed=is_resumed, allow=allow, is_audited=is_audited)
    run_command(job, show=lambda _: None)
    return 0


def _take_allow(arguments: Sequence[str]) -> tuple[tuple[str, ...], list[str]]:
    """Take `--allow lanes,dataset,seed` out of the arguments."""
    text, rest = take_option("--allow", arguments)
    allow = () if text is None else tuple(text.split(","))
    if any(name not in MAY_DIFFER for name in allow):
        raise ConfigError(
            f"--allow must list what may differ, out of {', '.join(MAY_DIFFER)}: got {text or 'nothing'}."
        )
    return allow, rest
