"""Reads the variables of torchrun, Slurm or MPI: which process this is, and where all meet. No torch."""

import hashlib
import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lanewise.errors import ConfigError, WorldError

_TORCHRUN_NUMBERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_TORCHRUN = (*_TORCHRUN_NUMBERS, "MASTER_ADDR", "MASTER_PORT")
_SLURM_NUMBERS = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_NUM_TASKS")
_SLURM_PLACES = (*_SLURM_NUMBERS, "SLURM_STEP_TASKS_PER_NODE")
_SLURM = (*_SLURM_PLACES, "SLURM_STEP_NODELIST", "SLURM_JOB_ID", "SLURM_STEP_ID")

# Of Open MPI, and of hydra, which starts the processes of MPICH and of Intel MPI; in the order of torchrun's.
_OPEN_MPI_NUMBERS = (
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)
_HYDRA_NUMBERS = ("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE", "MPI_LOCALNRANKS")
_MPIRUN_OPTIONS = {
    _OPEN_MPI_NUMBERS: "-x MASTER_ADDR=HOST -x MASTER_PORT=29400",
    _HYDRA_NUMBERS: "-genv MASTER_ADDR HOST -genv MASTER_PORT 29400",
}
"""How mpirun is told where the processes meet."""
_ONLY_MPIRUNS = {"OMPI_COMM_WORLD_SIZE", "MPI_LOCALNRANKS"}
"""What srun never sets; it sets PMI_RANK and PMI_SIZE with some of its plugins."""

# Below Linux's ephemeral ports, which begin at 32768: no outgoing connection can hold the port by chance.
_FIRST_PORT, _NUM_PORTS = 10_000, 20_000


@dataclass(frozen=True)
class Environment:
    """The place of this process among all processes of the run.

    Two machines with two processes each:

        rank               0  1  2  3     unique over all machines
        local_rank         0  1  0  1     unique on its machine; the index of its GPU
        world_size         4  4  4  4
        local_world_size   2  2  2  2
        machine            0  0  2  2     the same on one machine, and different on others
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    master_address: str = ""
    """The host where the processes meet, that of rank 0; empty for a process alone."""
    master_port: int = 0
    machine: int = 0
    terminal: int = 0
    """The same for processes whose output goes to the same place: of a machine, or all of srun or mpirun."""
    has_agent_store: bool = False
    """Whether an agent keeps the store at which all meet; else rank 0 does."""
    is_restarted: bool = False
    """Whether torchrun says that the processes are started again; it says so on some machines only."""

    @property
    def keeps_store(self) -> bool:
        """Whether this process keeps the store."""
        return self.rank == 0 and not self.has_agent_store

    @classmethod
    def from_env(cls, variables: Mapping[str, str]) -> "Environment | None":
        """Read the variables of torchrun (or of whatever sets the same ones), else of srun, else of mpirun.

        Slurm's count only inside a step of several tasks: its batch script has a SLURM_PROCID as well, and
        would wait for the others for ever. They do not count under mpirun, which in a job of Slurm starts its
        daemons by srun: the processes then have the variables of a step that is not theirs.

        Args:
            variables: usually `os.environ`.

        Returns:
            The place of this process, or None where the variables describe no world.

        Raises:
            WorldError: if only some of the variables are set, or they contradict each other.
        """
        if {"RANK", "WORLD_SIZE"} & variables.keys():
            return cls._from_torchrun(variables)
        if _counts_several(variables, "SLURM_STEP_NUM_TASKS") and not _ONLY_MPIRUNS & variables.keys():
            return cls._from_slurm(variables)
        for names in _MPIRUN_OPTIONS:
            if _counts_several(variables, names[2]):
                return cls._from_mpi(variables, names)
        if _counts_several(variables, "HOROVOD_SIZE"):
            number = variables.get("HOROVOD_LOCAL_SIZE", variables["HOROVOD_SIZE"])
            raise WorldError(
                f"horovodrun started {variables['HOROVOD_SIZE']} processes, which do not know where they "
                f"meet. Write torchrun --nproc-per-node {number} -m lanewise train CONFIG instead."
            )
        return None

    @classmethod
    def _from_torchrun(cls, variables: Mapping[str, str]) -> "Environment":
        if "LOCAL_SIZE" in variables:  # so DeepSpeed's launcher calls it
            variables = {"LOCAL_WORLD_SIZE": variables["LOCAL_SIZE"], **variables}
        remedy = (
            "Start through torchrun; or set them too, as mp.spawn and GNU parallel do not; or unset RANK and "
            "WORLD_SIZE."
        )
        _require(_TORCHRUN, variables, "a world", remedy)
        rank, local_rank, world_size, local_world_size = _numbers(_TORCHRUN_NUMBERS, variables)
        address, port = variables["MASTER_ADDR"], _port(variables)
        # torchrun numbers the processes of a machine one after the other.
        return cls(
            rank,
            local_rank,
            world_size,
            local_world_size,
            address,
            port,
            machine=rank - local_rank,
            terminal=rank - local_rank,
            has_agent_store=variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            is_restarted=variables.get("TORCHELASTIC_RESTART_COUNT", "0") != "0",
        )

    @classmethod
    def _from_slurm(cls, variables: Mapping[str, str]) -> "Environment":
        remedy = "Start through srun, or unset SLURM_STEP_NUM_TASKS to train in one process."
        _require(_SLURM, variables, "a step of Slurm", remedy)
        rank, local_rank, node, world_size = (_integer(variables, name) for name in _SLURM_NUMBERS)
        sizes = _tasks_per_node(variables["SLURM_STEP_TASKS_PER_NODE"])
        is_in_step = sum(sizes) == world_size and 0 <= rank < world_size
        if not (is_in_step and 0 <= node < len(sizes) and 0 <= local_rank < sizes[node]):
            got = ", ".join(f"{name}={variables[name]}" for name in _SLURM_PLACES)
            raise WorldError(
                f"the environment contradicts itself: got {got}. "
                "Start through srun, and set none of these variables."
            )
        address = variables.get("MASTER_ADDR")
        if address is None:
            nodes = variables["SLURM_STEP_NODELIST"]
            address = _first_host(nodes)
            if rank == 0 and node != 0:
                raise WorldError(
                    f"the processes meet at rank 0, and look for it on the first host of {nodes}: got "
                    f"SLURM_PROCID=0 with SLURM_NODEID={node}. Set MASTER_ADDR to the host of task 0, or "
                    "use another --distribution."
                )
        port = _port(variables) if "MASTER_PORT" in variables else _step_port(variables)
        return cls(rank, local_rank, world_size, sizes[node], address, port, node)

    @classmethod
    def _from_mpi(cls, variables: Mapping[str, str], names: tuple[str, str, str, str]) -> "Environment":
        remedy = "Use an mpirun that sets them, such as that of Open MPI, MPICH or Intel MPI; or torchrun."
        _require(names, variables, "processes of MPI", remedy)
        numbers = _numbers(names, variables)
        if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in variables]:
            raise WorldError(
                f"mpirun started {numbers[2]} processes, which do not know where they meet, without "
                f"{' and '.join(missing)}. Name the host of rank 0 and a free port there: "
                f"mpirun {_MPIRUN_OPTIONS[names]} ..."
            )
        return cls(*numbers, variables["MASTER_ADDR"], _port(variables), _number_of_host())


def _require(names: Sequence[str], variables: Mapping[str, str], described: str, remedy: str) -> None:
    if missing := [name for name in names if name not in variables]:
        raise WorldError(
            f"the environment describes {described} only in part, without {', '.join(missing)}. {remedy}"
        )


def _numbers(names: Sequence[str], variables: Mapping[str, str]) -> tuple[int, int, int, int]:
    """Read rank, local rank, world size and local world size."""
    rank, local_rank, world_size, local_world_size = (_integer(variables, name) for name in names)
    if not (0 <= rank < world_size and 0 <= local_rank < local_world_size <= world_size):
        raise WorldError(
            f"the environment contradicts itself: got {names[0]}={rank} of {names[2]}={world_size} and "
            f"{names[1]}={local_rank} of {names[3]}={local_world_size}."
        )
    return rank, local_rank, world_size, local_world_size


def _counts_several(variables: Mapping[str, str], name: str) -> bool:
    return name in variables and _integer(variables, name) > 1


def _number_of_host() -> int:
    """Return a number that follows from the name of this host: no variable of mpirun counts the machines.

    Neither do the ranks of a machine follow each other, with `--map-by node` for instance.
    """
    return int.from_bytes(hashlib.sha256(socket.gethostname().encode()).digest()[:8])


def require_no_world(what: str) -> None:
    """Raise ConfigError where torchrun, srun or mpirun started this process.

    Args:
        what: which command does what by itself, as the beginning of a sentence.
    """
    if Environment.from_env(os.environ) is not None:
        raise ConfigError(f"{what}: run it without torchrun, srun or mpirun.")


def _integer(variables: Mapping[str, str], name: str) -> int:
    """Read one variable."""
    try:
        return int(variables[name])
    except ValueError:
        raise WorldError(f"{name} must be an integer: got '{variables[name]}'.") from None


def _port(variables: Mapping[str, str]) -> int:
    """Read MASTER_PORT."""
    port = _integer(variables, "MASTER_PORT")
    if not 0 < port < 65536:
        raise WorldError(f"MASTER_PORT must be a port: got {port}. Use 1 to 65535.")
    return port


def _step_port(variables: Mapping[str, str]) -> int:
    """Derive a port that is the same for all tasks of a step, and usually another one for other steps.

    Two steps have the same port only if they are 20,000 apart in one job, or their jobs about 200 apart.
    """
    job, step = _integer(variables, "SLURM_JOB_ID"), _integer(variables, "SLURM_STEP_ID")
    return _FIRST_PORT + (101 * job + step) % _NUM_PORTS


def _tasks_per_node(written: str) -> list[int]:
    """Expand `2(x3),1` to [2, 2, 2, 1]."""
    sizes = []
    for part in written.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise WorldError(
                f"SLURM_STEP_TASKS_PER_NODE must be written like 2(x3),1: got '{written}'. "
                "Start through srun, and do not set it."
            )
        sizes += [int(match[1])] * int(match[2] or 1)
    return sizes


def _first_host(written: str) -> str:
    """Expand the first host of `gpu-a[003-010,12]-ib,login` to `gpu-a003-ib`."""
    match = re.match(r"((?:[^\s\[\],]|\[\d+(?:[-,]\d+)*\])+)(?:,|$)", written)
    if match is None:
        raise WorldError(
            f"SLURM_STEP_NODELIST must be written like node[1-2,07]: got '{written}'. "
            "Set MASTER_ADDR to the host of task 0."
        )
    return re.sub(r"\[(\d+)[^]]*\]", r"\1", match[1])
