"""The key `data.order`: the orders of samples that have a name, or a class of the user's own."""

from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import Any

from lanewise.config.check import Section, suggest

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
