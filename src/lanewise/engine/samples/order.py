"""Chooses the order of a run's samples."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pkgutil import resolve_name
from typing import Any

from lanewise.config import ORDERS
from lanewise.errors import ConfigError, DataError
from lanewise.lanes import OrderInputs, SampleOrder


@dataclass(frozen=True)
class OrderChoice:
    """The choice of an order, made before the samples are known."""

    make: Callable[[OrderInputs], SampleOrder]
    spec: Mapping[str, Any]
    """The class of the order and its arguments except the inputs, as read back from JSON: part of the run's
    identity."""

    @classmethod
    def of(cls, make: "str | Callable[[OrderInputs], SampleOrder]") -> "OrderChoice":
        """Choose an order by name, by class, or by a `functools.partial` of a class with further arguments.

        Raises:
            ConfigError: if there is no order of that name.
        """
        chosen: Any = make
        if isinstance(make, str):
            if make not in ORDERS:
                raise ConfigError(f"order must be one of {', '.join(ORDERS)}, or a SampleOrder: got {make}.")
            chosen = resolve_name(ORDERS[make])
        named = chosen.func if isinstance(chosen, partial) else chosen
        known = {resolve_name(class_path): class_path for class_path in ORDERS.values()}
        class_path = known.get(named, f"{named.__module__}.{named.__qualname__}")
        arguments = chosen.keywords if isinstance(chosen, partial) else {}
        spec = json.loads(json.dumps({"class_path": class_path, "init_args": arguments}, default=str))
        return cls(chosen, spec)

    @classmethod
    def default(cls, dataset: Any) -> "OrderChoice":
        """Choose the default order for a dataset: blocked if it has blocks, else shuffled."""
        return cls.of("blocked" if hasattr(dataset, "block_sizes") else "shuffled")


def require_block_sizes(dataset: Any) -> Callable[[], Any]:
    """Return a function that returns how many samples each block of a dataset has.

    If the dataset has no blocks, calling the function raises DataError.
    """

    def raise_error() -> Any:
        raise DataError(
            f"data.order blocked needs a dataset in blocks: {type(dataset).__name__} has no block_sizes(), "
            "which returns how many consecutive samples each block holds. Use the order shuffled."
        )

    return getattr(dataset, "block_sizes", raise_error)
