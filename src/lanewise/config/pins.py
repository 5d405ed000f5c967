"""The environment variables that must be fixed before torch is imported."""

import os
import sys

from lanewise.config.run import Equality
from lanewise.errors import ConfigError


def pin_environment(threads: int, equality: Equality) -> None:
    """Fix what the math libraries read from the environment when they load.

    - `OMP_NUM_THREADS`, `MKL_NUM_THREADS`: a sum that is split over another number of threads adds its floats
      in another order. Fixed for both grades, since the default depends on the machine.
    - `MKL_CBWR=AUTO` (exact only): MKL chooses its code path by the alignment of arrays in memory, so that
      one program may give several results, unless its conditional numerical reproducibility is on. MKL wants
      that decided before its first call.
    - `CUBLAS_WORKSPACE_CONFIG=:4096:8` (exact only): with several streams, cuBLAS may pick another algorithm,
      and so another order of additions, by the workspace that it finds. NVIDIA's cuBLAS guide names this
      setting, a workspace of fixed size, as one of two that make it deterministic.

    Call it before torch is imported, in every process.

    Raises:
        ConfigError: equality is exact, and torch was imported without `MKL_CBWR=AUTO`.
    """
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(threads)
    if equality != "exact":
        return
    mkl_cbwr = os.environ.get("MKL_CBWR")
    if "torch" in sys.modules and mkl_cbwr != "AUTO":
        mistake = (
            f"distributed.equality exact needs MKL_CBWR=AUTO from before torch is imported: got "
            f"{mkl_cbwr or 'it unset'}, with torch imported already. Start the program with MKL_CBWR=AUTO in "
            f"its environment, or call lanewise.config.pin_environment before the first import of torch."
        )
        raise ConfigError(mistake)
    os.environ["MKL_CBWR"] = "AUTO"
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
