"""The environment variables that must be fixed before torch is imported."""

import ctypes
import os
import sys
from pathlib import Path

from lanewise.config.distributed import Equality
from lanewise.errors import ConfigError

# MKL_CBWR_BRANCH and MKL_CBWR_AUTO of mkl_types.h
_CBWR_BRANCH, _CBWR_AUTO = 1, 2


def pinned_variables(threads: int, equality: Equality) -> dict[str, str]:
    """Return what the math libraries must read from the environment when they load.

    - `OMP_NUM_THREADS`, `MKL_NUM_THREADS`: a sum that is split over another number of threads adds its floats
      in another order. Fixed for both grades, since the default depends on the machine.
    - `MKL_CBWR=AUTO` (exact only): MKL chooses its code path by the alignment of arrays in memory, so that
      one program may give several results, unless its conditional numerical reproducibility is on. It must
      be set before the first call of MKL.
    - `CUBLAS_WORKSPACE_CONFIG=:4096:8` (exact only): with several streams, cuBLAS may pick another algorithm,
      and so another order of additions, by the workspace that it finds. NVIDIA's cuBLAS guide names this
      setting, a workspace of fixed size, as one of two that make it deterministic.
    """
    variables = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    if equality == "exact":
        variables |= {"MKL_CBWR": "AUTO", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    return variables


def pin_environment(threads: int, equality: Equality) -> None:
    """Set `pinned_variables` in this process; call it before anything is computed.

    Raises:
        ConfigError: equality is exact, and MKL was used already without `MKL_CBWR=AUTO`.
    """
    os.environ.update(pinned_variables(threads, equality))
    if equality == "exact" and not _mkl_is_pinned():
        raise ConfigError(
            "equality exact needs MKL_CBWR=AUTO to be set before MKL is first used, and this process has "
            "used it already. Ask for exact earlier in the program, or start the program with MKL_CBWR=AUTO "
            "in its environment."
        )


def _mkl_is_pinned() -> bool:
    """Ask the MKL that torch carries for its reproducibility mode, which it fixes when it is first used."""
    torch = sys.modules.get("torch")
    if torch is None or torch.__file__ is None:
        return True  # it will find the variable when it is loaded
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        mode: int = library.mkl_serv_cbwr_get(_CBWR_BRANCH)
    except (OSError, AttributeError):
        return True  # a torch without MKL
    return mode == _CBWR_AUTO
