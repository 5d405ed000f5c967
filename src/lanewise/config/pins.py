"""The environment variables that must be fixed before torch is imported."""

import os
import sys

from lanewise.config.run import Equality
from lanewise.errors import ConfigError


def pinned_variables(threads: int, equality: Equality) -> dict[str, str]:
    """Return what the math libraries must read from the environment when they load.

    - `OMP_NUM_THREADS`, `MKL_NUM_THREADS`: a sum that is split over another number of threads adds its floats
      in another order. Fixed for both grades, since the default depends on the machine.
    - `MKL_CBWR=AUTO` (exact only): MKL chooses its code path by the alignment of arrays in memory, so that
      one program may give several results, unless its conditional numerical reproducibility is on. MKL wants
      that decided before its first call.
    - `CUBLAS_WORKSPACE_CONFIG=:4096:8` (exact only): with several streams, cuBLAS may pick another algorithm,
      and so another order of additions, by the workspace that it finds. NVIDIA's cuBLAS guide names this
      setting, a workspace of fixed size, as one of two that make it deterministic.
    """
    variables = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    if equality == "exact":
        variables |= {"MKL_CBWR": "AUTO", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    return variables


def pin_environment(threads: int, equality: Equality) -> None:
    """Set `pinned_variables` in this process; call it before torch is imported.

    Raises:
        ConfigError: equality is exact, and torch was imported without `MKL_CBWR=AUTO`.
    """
    mkl_cbwr = os.environ.get("MKL_CBWR")
    if equality == "exact" and "torch" in sys.modules and mkl_cbwr != "AUTO":
        mistake = (
            f"distributed.equality exact needs MKL_CBWR=AUTO from before torch is imported: got "
            f"{mkl_cbwr or 'it unset'}, with torch imported already. Start the program with MKL_CBWR=AUTO in "
            f"its environment, or call lanewise.config.pin_environment before the first import of torch."
        )
        raise ConfigError(mistake)
    os.environ.update(pinned_variables(threads, equality))
