"""The section `data`: in which order samples come, and who loads them."""

from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import Annotated, Any

from lanewise.config.check import Section, at_least, suggest
from lanewise.config.class_path import ClassConfig

ORDERS = {
    name: f"lanewise.lanes.{name.capitalize()}Order"
    for name in ("shuffled", "sequential", "blocked", "bucketed", "weighted")
}
"""The sample orders that have a name, and their classes. This is the only list of them."""


def _order_is_known(class_path: str) -> Iterator[str]:
    if "." not in class_path and class_path not in ORDERS:
        yield (
            f"data.order must be {', '.join(ORDERS)}, or the class_path of a lanewise.lanes.SampleOrder: "
            f"got {class_path}. {suggest(class_path, ORDERS)}"
        )


class OrderConfig(Section):
    """An order of samples. It may be written as its name alone."""

    RULES = (_order_is_known,)
    TEXT_KEY = "class_path"

    class_path: str
    """shuffled, sequential, blocked, bucketed, weighted, or a class as `module.Class`. A name without
    arguments may stand for the section: `data.order: shuffled`."""
    init_args: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the order by name, such as max_tokens of bucketed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "class_path", ORDERS.get(self.class_path, self.class_path))


class DataConfig(Section):
    """How samples are ordered and loaded."""

    num_workers: Annotated[int, at_least(0)] = 0
    """Loader processes of each device; 0: samples are loaded in the training process."""
    order: OrderConfig | None = None
    """Order of an epoch's samples; unset: blocked for a dataset in blocks, else shuffled."""
    shuffle_buffer: Annotated[int, at_least(0)] = 0
    """Of a stream: how many samples of each lane are held at once and shuffled; 0: they stay as they come."""
    drop_last: bool = False
    """Whether to drop the partial last step of an epoch instead of weighting it; of a stream, all steps that
    some lane cannot fill."""

    @property
    def order_class(self) -> ClassConfig | None:
        """The class of the order and its arguments; None where it is unset."""
        order = self.order
        return None if order is None else ClassConfig(class_path=order.class_path, init_args=order.init_args)
