"""Open MPI's mpirun, with what it needs on any machine."""

import shutil

from tests.listening import reserve_port

WHY_NOT = None if shutil.which("mpirun") else "not installed: mpirun (Debian: openmpi-bin)"

# As root, and with more processes than the machine has cores.
MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe")


def meeting() -> tuple[str, ...]:
    """Return the options that tell the processes where they meet on this machine, at a port that is free."""
    port = reserve_port()
    return ("-x", "MASTER_ADDR=127.0.0.1", "-x", f"MASTER_PORT={port}")
