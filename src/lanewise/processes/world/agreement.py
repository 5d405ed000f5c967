"""Compares between the processes of a world what equal bytes depend on."""

import socket

import torch

from lanewise.errors import WorldError
from lanewise.processes.device.determinism import exact_pins
from lanewise.processes.world.world import World

_REMEDIES = {
    "torch": "Install the same version of torch on every host.",
    "cpu_capability": "Use hosts with the same kind of CPU, and set ATEN_CPU_CAPABILITY on all of them or on "
    "none. It does not make different CPUs equal: MKL and oneDNN choose their code by the CPU.",
    "onednn": "Use hosts with the same kind of CPU, or set ONEDNN_MAX_CPU_ISA on all of them to what each "
    "has, such as AVX512_CORE_BF16.",
    "gpu": "Use hosts with the same model of GPU.",
    "tf32": "Set TORCH_ALLOW_TF32_CUBLAS_OVERRIDE on all hosts or on none, and leave TF32 to precision.",
    "threads": "Give every process the same distributed.threads.",
}


def require_equal_machines(world: World) -> None:
    """Check that `exact` can hold in this world. Collective: every rank must call this.

    Raises:
        WorldError: on every rank, if another one differs from rank 0; names its host and both values.
    """
    own = {**exact_pins(world.device), "threads": str(torch.get_num_threads())}
    (first_host, first), *others = world.all_gather_tree([socket.gethostname(), own])
    for rank, (host, pins) in enumerate(others, start=1):
        names = [name for name in _REMEDIES if pins.get(name) != first.get(name)]
        if names:
            theirs, ours = (
                ", ".join(f"{name}={found.get(name, 'none')}" for name in names) for found in (pins, first)
            )
            raise WorldError(
                f"distributed.equality=exact needs equal machines: got {theirs} of rank {rank} on {host}, "
                f"and {ours} of rank 0 on {first_host}. {' '.join(_REMEDIES[name] for name in names)} "
                "Or use distributed.equality=close."
            )
