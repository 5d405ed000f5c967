"""What each reducer says of itself before it is built, to whoever plans, measures or checks a run."""

from collections.abc import Mapping
from typing import Literal, NamedTuple

ReducerName = Literal["ddp", "fsdp", "single", "data_parallel", "balanced_data_parallel"]


class ReducerKind(NamedTuple):
    """What is known of a reducer without a model."""

    runs_on: Literal["device", "process", "processes"]
    """Whether it is for one device, for several of one process, or for processes with a device each."""
    has_options: bool = False
    """Whether it knows `shard_optimizer`, `compression` and `sync_batch_norm`."""
    shards_weights: bool = False
    """Whether each process has a part of the weights, so that all must run equally many forwards."""
    gathers_outputs: bool = False
    """Whether the outputs of all lanes travel to the first device."""

    def is_for(self, num_devices: int) -> bool:
        """Tell whether it is for so many devices."""
        return (self.runs_on == "device") == (num_devices == 1)


REDUCERS: Mapping[ReducerName, ReducerKind] = {
    "single": ReducerKind("device"),
    "data_parallel": ReducerKind("process", gathers_outputs=True),
    "balanced_data_parallel": ReducerKind("process"),
    "ddp": ReducerKind("processes", has_options=True),
    "fsdp": ReducerKind("processes", shards_weights=True),
}
"""The reducers, in the order in which plan shows them; `lanewise.reduce` builds them."""
ALONE = next(name for name, kind in REDUCERS.items() if kind.runs_on == "device")
"""The reducer of a single device."""
DEFAULT_REDUCER: ReducerName = "ddp"
"""The reducer of a run whose configuration names none; with one process it is for one device too."""
