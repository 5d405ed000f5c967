"""Runs a script as `python` or torchrun would, in processes that are forked with torch imported."""

import os
import runpy
import socket
import sys
import warnings
from contextlib import redirect_stdout
from pathlib import Path

from lanewise.testing import run_distributed
from lanewise.world.world import World


def run_script(script: Path, cwd: Path, num_processes: int = 1) -> str:
    """Run a script to its end and return what rank 0 printed.

    Args:
        script: modules beside it can be imported.
        cwd: its working directory; gets the file `stdout`.
        num_processes: more than one find the environment that torchrun prepares.
    """
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    run_distributed(_run, num_processes, str(script), str(cwd), port)
    return (cwd / "stdout").read_text()


def _run(world: World, script: str, cwd: str, port: int) -> None:
    world.close()  # the script joins one by itself
    world.close = lambda: None  # type: ignore[method-assign]
    if world.world_size > 1:
        place = {"RANK": world.rank, "LOCAL_RANK": world.rank}
        sizes = {"WORLD_SIZE": world.world_size, "LOCAL_WORLD_SIZE": world.world_size}
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in (place | sizes | meeting).items()})
    os.chdir(cwd)
    sys.argv = [script]
    sys.path.insert(0, str(Path(script).parent))
    warnings.resetwarnings()  # those of other libraries are not ours to mend
    with Path("stdout" if world.rank == 0 else os.devnull).open("w") as file, redirect_stdout(file):
        runpy.run_path(script, run_name="__main__")
