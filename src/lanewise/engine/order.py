"""Which order a run has, and what it is made from."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from lanewise.config import ORDERS
from lanewise.errors import ConfigError, DataError
from lanewise.lanes import (
    BlockedOrder,
    BucketedOrder,
    OrderInputs,
    SampleOrder,
    SequentialOrder,
    ShuffledOrder,
    WeightedOrder,
)

_CLASSES: Mapping[str, type[SampleOrder]] = {
    "shuffled": ShuffledOrder,
    "sequential": SequentialOrder,
    "blocked": BlockedOrder,
    "bucketed": BucketedOrder,
    "weighted": WeightedOrder,
}


@dataclass(frozen=True)
class OrderChoice:
    """An order that was chosen, before anything is known of the samples."""

    make: Callable[[OrderInputs], SampleOrder]
    spec: Mapping[str, Any]
    """Its class and its arguments besides the inputs, as JSON gives them back: they identify a run."""

    @classmethod
    def of(cls, make: "str | Callable[[OrderInputs], SampleOrder]") -> "OrderChoice":
        """Choose by a name, by a class, or by a `functools.partial` of a class with further arguments.

        Raises:
            ConfigError: if there is no such name.
        """
        if isinstance(make, str):
            if make not in _CLASSES:
                raise ConfigError(f"order must be one of {', '.join(ORDERS)}, or a SampleOrder: got {make}.")
            return cls(_CLASSES[make], {"class_path": ORDERS[make], "init_args": {}})
        named: Any = make.func if isinstance(make, partial) else make
        own = {known: ORDERS[name] for name, known in _CLASSES.items()}
        class_path = own.get(named, f"{named.__module__}.{named.__qualname__}")
        arguments = make.keywords if isinstance(make, partial) else {}
        return cls(
            make, json.loads(json.dumps({"class_path": class_path, "init_args": arguments}, default=str))
        )

    @classmethod
    def default(cls, dataset: Any) -> "OrderChoice":
        """Choose by what a dataset is."""
        return cls.of("blocked" if hasattr(dataset, "block_sizes") else "shuffled")


def require_block_sizes(dataset: Any) -> Callable[[], Any]:
    """Return what tells how many samples each block of a dataset holds, or raises DataError."""

    def raise_error() -> Any:
        raise DataError(
            f"data.order blocked needs a dataset in blocks: {type(dataset).__name__} has no block_sizes(), "
            "which returns how many consecutive samples each block holds. Use the order shuffled."
        )

    return getattr(dataset, "block_sizes", raise_error)
