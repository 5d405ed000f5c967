"""`lanewise train`: in this process, in workers that it starts, or as one worker of a given world."""

import atexit
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from lanewise.config import RunConfig, dump_config, load_config, pin_environment
from lanewise.config.class_path import add_search_path
from lanewise.errors import ConfigError, LanewiseError
from lanewise.launch import has_agent, launch_local, record_failure
from lanewise.lifeline import PARENT_PID_VARIABLE, die_with_parent
from lanewise.run_dir import RunDir
from lanewise.world.environment import Environment

_HELP = """\
usage: lanewise train CONFIG [--key.path value ...]

Trains as CONFIG says (.yaml, .json, .toml or .jsonnet). Any key can be overridden:

  lanewise train mnist.yaml --distributed.devices 4 --optimizer.init_args.lr 3e-4

Under torchrun each process joins the others. Give a CONFIG with --help to see the arguments of its classes.
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
    if PARENT_PID_VARIABLE in os.environ:
        die_with_parent()
    config = load_config(arguments[0], arguments[1:])
    pin_environment(config.distributed.threads, config.distributed.equality)
    add_search_path(config)
    place = Environment.from_env(os.environ)
    if place is None and (config.distributed.devices or 1) > 1:
        _launch(config, arguments)
    elif place is None:
        _check(config, Environment())
        with RunDir(Path(config.train.run_dir)).claim():
            _run(config, Environment())
    else:
        _join(config, place)
    return 0


def _launch(config: RunConfig, arguments: Sequence[str]) -> None:
    """Start one worker for each device of this machine; each runs this command again."""
    num_processes = config.distributed.devices or 1
    _check(config, Environment(local_world_size=num_processes, world_size=num_processes))
    with RunDir(Path(config.train.run_dir)).claim():
        launch_local(["train", *arguments], num_processes)


def _join(config: RunConfig, place: Environment) -> None:
    """Be one process of a world that a launcher prepared, and never wait for the others after an error."""
    try:
        with ExitStack() as stack:
            if PARENT_PID_VARIABLE not in os.environ:  # else the launcher did both
                _check(config, place)
                if place.rank == 0:
                    stack.enter_context(RunDir(Path(config.train.run_dir)).claim())
            _run(config, place)
    except BaseException as error:
        record_failure(error)
        # The agent shows the first failure of all ranks, and shows it once.
        if not has_agent() or logging.root.handlers:
            logging.getLogger(__name__).exception(
                "rank %d failed", place.rank, extra={"is_for_file_only": has_agent()}
            )
        # Leaving in the usual way would run destructors that wait for ranks which are gone.
        logging.shutdown()
        os._exit(error.exit_code if isinstance(error, LanewiseError) else 1)
    # Threads of gloo outlive the process group, and one that returns to a python that is being torn down
    # aborts the process (seen: SIGABRT after a good run, 1 in 20). So this one ends without tearing down.
    atexit._run_exitfuncs()  # noqa: SLF001 - the user's, logging's and multiprocessing's
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _check(config: RunConfig, place: Environment) -> None:
    """Find what is wrong with the classes and the devices, before any worker starts."""
    from lanewise.config.classes import check_classes
    from lanewise.world.device import choose_device

    devices = config.distributed.devices
    if devices not in (None, place.local_world_size):
        raise ConfigError(
            f"distributed.devices contradicts the launcher: got {devices}, and {place.local_world_size} "
            "processes were started on this machine. Leave the key out under a launcher."
        )
    if place.world_size > config.batch.num_lanes:
        raise ConfigError(
            f"every process needs at least one lane: got {place.world_size} processes and "
            f"{config.batch.num_lanes} lanes. Start fewer, or use a smaller batch.micro_batch_size."
        )
    check_classes(config)
    choose_device(config.distributed.device_type, config.distributed.backend, place.local_world_size)


def _run(config: RunConfig, place: Environment) -> None:
    """Train as one process of the world."""
    from lanewise.engine import build_engine
    from lanewise.loggers import JsonlLogger, Logger, ProgressLogger, log_to
    from lanewise.world.determinism import exact_pins, set_determinism
    from lanewise.world.device import choose_device
    from lanewise.world.world import join_world

    run_dir = RunDir(Path(config.train.run_dir))
    log_to(run_dir.log(place.rank), is_rank_zero=place.rank == 0)
    set_determinism(config.distributed.equality, config.distributed.threads)
    device_type, backend = choose_device(
        config.distributed.device_type, config.distributed.backend, place.local_world_size
    )
    world = join_world(place, device_type, backend)
    loggers: list[Logger] = []
    engine = build_engine(config, world)
    if place.rank == 0:
        pins = "".join(f"# {name}: {value}\n" for name, value in exact_pins(world.device).items())
        run_dir.config.write_text(f"{pins}{dump_config(config)}", encoding="utf-8")
        loggers = [JsonlLogger(run_dir.metrics), ProgressLogger(0, engine.last_step)]
    engine.fit(run_dir, loggers)
    world.close()
