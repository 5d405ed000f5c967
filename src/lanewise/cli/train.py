"""`lanewise train CONFIG`."""

from lanewise.cli.arguments import Argument, Arguments, Command, flag
from lanewise.cli.evaluate import DRY_RUN
from lanewise.cli.help import help_width, write_keys
from lanewise.config import MAY_DIFFER
from lanewise.config.class_path import add_search_path
from lanewise.config.load import dump_config, load_config
from lanewise.errors import ConfigError


def _read_names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if any(name not in MAY_DIFFER for name in names):
        raise ValueError(f"list what may differ, out of {', '.join(MAY_DIFFER)}")
    return names


_CONFIG = Argument[str]("CONFIG", "the configuration, a file that ends in .yaml, .json, .toml or .jsonnet")
_RESUME = flag("--resume", "resumes from the newest good checkpoint in run_dir, if there is one")
_ALLOW = Argument[tuple[str, ...]](
    "--allow",
    f"with --resume: resumes although the checkpoint has other {', '.join(MAY_DIFFER[:-1])} or "
    f"{MAY_DIFFER[-1]}, those that are listed; with other lanes samples are augmented otherwise too",
    "A,B",
    _read_names,
    default=(),
)
_OVERWRITE = flag("--overwrite", "removes the run that is in run_dir, if there is one, and starts over")
_AUDIT = flag(
    "--audit", "writes the sample indices and a hash of the tensors of every lane, for `lanewise audit`"
)
_PRINT_CONFIG = flag("--print-config", "prints the configuration with all defaults, and does nothing")


def train(arguments: Arguments) -> int:
    """Train as the configuration says."""
    if arguments[_ALLOW] and not arguments[_RESUME]:
        raise ConfigError("--allow says what may differ on resume: add --resume, or leave it out.")
    if arguments[_OVERWRITE] and arguments[_RESUME]:
        raise ConfigError("--overwrite starts over, and --resume continues: leave one of them out.")
    config = load_config(arguments[_CONFIG], arguments.overrides)
    if arguments[_PRINT_CONFIG]:
        print(dump_config(config), end="")
        return 0

    from lanewise.commands.jobs.start import run_command
    from lanewise.commands.jobs.train import TrainJob

    job = TrainJob(
        config,
        is_resumed=arguments[_RESUME],
        allow=arguments[_ALLOW],
        overwrites=arguments[_OVERWRITE],
        is_audited=arguments[_AUDIT],
    )
    run_command(job, show=lambda _: None, is_dry=arguments[DRY_RUN])
    return 0


def _describe_configuration(arguments: Arguments) -> str:
    """Write every key, and the arguments of the classes of the configuration, if one is arguments."""
    if _CONFIG not in arguments.values:
        return write_keys()
    from lanewise.config.classes import describe_classes

    config = load_config(arguments[_CONFIG], arguments.overrides)
    add_search_path(config.search_path)
    return f"{write_keys()}\n{describe_classes(config, help_width())}"


COMMAND = Command(
    name="train",
    text="""\
Trains as CONFIG says. Any key of it can be overridden:

  lanewise train mnist.yaml --distributed.devices 4 --optimizer.init_args.lr 3e-4

Under torchrun, srun or mpirun each process joins the others. Give a CONFIG with --help to see the arguments
of its classes.""",
    run=train,
    operands=(_CONFIG,),
    options=(_RESUME, _ALLOW, _OVERWRITE, _AUDIT, DRY_RUN, _PRINT_CONFIG),
    has_overrides=True,
    more_help=_describe_configuration,
)
