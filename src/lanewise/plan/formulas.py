"""Which formula is whose."""

from collections.abc import Callable, Mapping

from lanewise.config import ReducerName
from lanewise.plan.memory import Layout, Measured, Memory, Moments
from lanewise.plan.replicas import moments_of_replicas
from lanewise.plan.sharded import moments_of_fsdp
from lanewise.plan.whole_model import moments_of_ddp, moments_of_single

_MOMENTS: Mapping[ReducerName, Callable[[Measured, Layout], Moments]] = {
    "single": moments_of_single,
    "data_parallel": moments_of_replicas,
    "balanced_data_parallel": moments_of_replicas,
    "ddp": moments_of_ddp,
    "fsdp": moments_of_fsdp,
}


def peak_memory(measured: Measured, layout: Layout) -> Memory:
    """Return what is alive at the moment of a step at which most is, in the process that needs most."""
    return max(_MOMENTS[layout.reducer](measured, layout), key=lambda memory: memory.num_bytes)
