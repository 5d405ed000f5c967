"""Reads torchrun's or Slurm's variables: which process this is, and where it meets the others. No torch."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lanewise.errors import WorldError

_TORCHRUN_NUMBERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_TORCHRUN = (*_TORCHRUN_NUMBERS, "MASTER_ADDR", "MASTER_PORT")
_SLURM_NUMBERS = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_NUM_TASKS")
_SLURM_PLACES = (*_SLURM_NUMBERS, "SLURM_STEP_TASKS_PER_NODE")
_SLURM = (*_SLURM_PLACES, "SLURM_STEP_NODELIST", "SLURM_JOB_ID", "SLURM_STEP_ID")

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
    """The same for processes whose output goes to the same place: of a machine, and of all under srun."""
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
        """Read the variables of torchrun (or of whatever sets the same ones), else those of srun.

        Slurm's count only inside a step of several tasks: its batch script has a SLURM_PROCID as well, and
        would wait for the others for ever.

        Args:
            variables: usually `os.environ`.

        Returns:
            The place of this process, or None where the variables describe no world.

        Raises:
            WorldError: if only some of the variables are set, or they contradict each other.
        """
        if {"RANK", "WORLD_SIZE"} & variables.keys():
            return cls._from_torchrun(variables)
        if "SLURM_STEP_NUM_TASKS" in variables and _integer(variables, "SLURM_STEP_NUM_TASKS") > 1:
            return cls._from_slurm(variables)
        return None

    @classmethod
    def _from_torchrun(cls, variables: Mapping[str, str]) -> "Environment":
        remedy = "Start through torchrun, or unset RANK and WORLD_SIZE."
        _require(_TORCHRUN, variables, "a world", remedy)
        rank, local_rank, world_size, local_world_size = (
            _integer(variables, name) for name in _TORCHRUN_NUMBERS
        )
        if not (0 <= rank < world_size and 0 <= local_rank < local_world_size <= world_size):
            raise WorldError(
                f"the environment contradicts itself: got RANK={rank} of WORLD_SIZE={world_size} and "
                f"LOCAL_RANK={local_rank} of LOCAL_WORLD_SIZE={local_world_size}."
            )
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


def _require(names: Sequence[str], variables: Mapping[str, str], described: str, remedy: str) -> None:
    if missing := [name for name in names if name not in variables]:
        raise WorldError(
            f"the environment describes {described} only in part, without {', '.join(missing)}. {remedy}"
        )


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
