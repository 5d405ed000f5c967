"""A model of three parameters in a root and two blocks, and a lane's memory that can be added up by hand."""

from typing import Any

from lanewise.commands.plan.memory import LaneMark, LaneMemory, Measured, Setting, Stretch
from lanewise.commands.plan.model import ROOT, Weight
from lanewise.commands.plan.update import Update

WEIGHTS = [Weight(10, 10, True, ROOT), Weight(20, 10, True, 1), Weight(20, 10, True, 2)]
GRADIENT_BYTES = 500

MEMORY = LaneMemory(
    [
        Stretch(LaneMark.FORWARD, 0, 50, 60),
        Stretch(LaneMark.BLOCK_FORWARD, 1, 60, 1000),
        Stretch(LaneMark.BLOCK_END, 1, 900, 900),
        Stretch(LaneMark.BLOCK_FORWARD, 2, 900, 2000),
        Stretch(LaneMark.BLOCK_END, 2, 1900, 1900),
        Stretch(LaneMark.BACKWARD, 0, 1900, 2100),
        Stretch(LaneMark.BLOCK_BACKWARD, 2, 2000, 2050),
        Stretch(LaneMark.GRADIENT, 2, 1500, 1500),
        Stretch(LaneMark.BLOCK_BACKWARD, 1, 1500, 1600),
        Stretch(LaneMark.GRADIENT, 1, 500, 500),
        Stretch(LaneMark.GRADIENT, 0, 50, 50),
        Stretch(LaneMark.END, 0, 50, 50),
    ],
    batch_bytes=0,
    output_bytes=30,
    loss_bytes=20,
    saved_bytes=1900,
)


def measured(**changes: Any) -> Measured:
    """What was measured; the optimizer keeps two numbers for each one, and computes with another."""
    whole = {
        "weights": WEIGHTS,
        "memory": MEMORY,
        "buffer_bytes": 0,
        "changed_buffer_bytes": 0,
        "num_buffers": 0,
        "update": lambda num_parts, _cut: Update(
            sum(2 * weight.shard_bytes(num_parts) for weight in WEIGHTS), GRADIENT_BYTES // num_parts
        ),
        "shards_optimizer": False,
        "has_average": False,
        "equality": "close",
        "shares_memory": True,
    }
    return Measured(**(whole | changes))


def setting(reducer: str, num_devices: int, num_lanes: int) -> Setting:
    return Setting(reducer=reducer, num_devices=num_devices, num_lanes=num_lanes)  # type: ignore[arg-type]
