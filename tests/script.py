"""Runs a script as `python` or torchrun would, in processes that are forked with torch imported."""

import os
import runpy
import subprocess
import sys
import warnings
from contextlib import redirect_stdout
from pathlib import Path

from torch.distributed import TCPStore

from lanewise.processes.world.world import World
from lanewise.testing import run_distributed
from tests.patience import patient


def run_script(
    script: Path, *arguments: object, cwd: Path, num_processes: int = 1, has_agent: bool = True
) -> str:
    """Run a script to its end and return what rank 0 printed.

    Args:
        script: modules beside it can be imported.
        arguments: those of its command line.
        cwd: its working directory; gets the file `stdout`.
        num_processes: more than one find the environment that torchrun prepares.
        has_agent: whether an agent keeps the store, as torchrun's does; else rank 0, as under srun or mpirun.
    """
    # It outlives the processes, as that of torchrun's agent does: rank 0's would go when rank 0 ends.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port
    if not has_agent:
        del store
    command_line = [str(script), *map(str, arguments)]
    run_distributed(_run, num_processes, command_line, str(cwd), port, has_agent)
    return (cwd / "stdout").read_text()


IN_FORKS = """
import os, runpy, sys, lanewise.data
for program in sys.argv[1:]:
    if not os.fork():
        break
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
else:
    sys.exit()
exec(program)
"""


def run_in_forks(*programs: str) -> "subprocess.CompletedProcess[str]":
    """Run programs in forks of one interpreter, which import torch once and end as interpreters do.

    The standard output has the exit code of each after what it printed.
    """
    command = [sys.executable, "-W", "ignore", "-c", IN_FORKS, *programs]
    return subprocess.run(command, capture_output=True, text=True, timeout=patient(120.0), check=True)


_kept: list[dict[str, object]] = []
"""What scripts defined. A model in DDP that goes right after a collective may wait for ever: it holds the GIL
while it ends gloo's threads, and one of them wants it in order to let go of a tensor (torch 2.13)."""


def _run(world: World, command_line: list[str], cwd: str, port: int, has_agent: bool) -> None:
    world.close()  # the script joins one by itself
    world.close = lambda: None  # type: ignore[method-assign]
    if world.world_size > 1:
        place = {"RANK": world.rank, "LOCAL_RANK": world.rank}
        sizes = {"WORLD_SIZE": world.world_size, "LOCAL_WORLD_SIZE": world.world_size}
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        agent = {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0}
        variables = place | sizes | meeting | (agent if has_agent else {})
        os.environ.update({name: str(value) for name, value in variables.items()})
    os.chdir(cwd)
    sys.argv = command_line
    sys.path.insert(0, str(Path(command_line[0]).parent))
    warnings.resetwarnings()  # those of other libraries are not ours to mend
    with Path("stdout" if world.rank == 0 else os.devnull).open("w") as file, redirect_stdout(file):
        _kept.append(runpy.run_path(command_line[0], run_name="__main__"))
