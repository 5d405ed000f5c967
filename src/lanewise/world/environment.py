"""Reads from torchrun's environment variables who this process is; no torch."""

from collections.abc import Mapping
from dataclasses import dataclass

from lanewise.errors import WorldError

_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Environment:
    """The place of this process among all processes of the run.

    Two machines with two processes each:

        rank               0  1  2  3     unique over all machines
        local_rank         0  1  0  1     unique on its machine; the index of its GPU
        world_size         4  4  4  4
        local_world_size   2  2  2  2
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1

    @classmethod
    def from_env(cls, variables: Mapping[str, str]) -> "Environment | None":
        """Read what torchrun (or anyone who speaks its language) has set.

        Args:
            variables: usually `os.environ`.

        Returns:
            The place of this process, or None where no world was prepared for it.

        Raises:
            WorldError: if only some of the variables are set, or they contradict each other.
        """
        if not {"RANK", "WORLD_SIZE"} & variables.keys():
            return None
        missing = [name for name in _VARIABLES if name not in variables]
        if missing:
            raise WorldError(
                f"the environment describes a world only in part: {', '.join(missing)} not set. "
                "Start through torchrun, or unset RANK and WORLD_SIZE."
            )
        try:
            rank, local_rank, world_size, local_world_size = (int(variables[name]) for name in _VARIABLES[:4])
        except ValueError as error:
            raise WorldError(
                f"RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE must be integers: {error}."
            ) from None
        if not (0 <= rank < world_size and 0 <= local_rank < local_world_size <= world_size):
            raise WorldError(
                f"the environment contradicts itself: got RANK={rank} of WORLD_SIZE={world_size} and "
                f"LOCAL_RANK={local_rank} of LOCAL_WORLD_SIZE={local_world_size}."
            )
        return cls(rank, local_rank, world_size, local_world_size)
