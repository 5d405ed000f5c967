"""The section `data`: in which order samples come, and who loads them."""

from typing import Annotated, Literal

from lanewise.config.check import Section, at_least
from lanewise.config.class_path import ClassConfig
from lanewise.config.orders import OrderConfig

MissingName = Literal["error", "skip"]


class DataConfig(Section):
    """How samples are ordered and loaded."""

    num_workers: Annotated[int, at_least(0)] = 0
    """Loader processes of each device; 0: samples are loaded in the training process."""
    pin_memory: bool = True
    """Whether batches for an accelerator wait in page-locked host memory, from which they are copied while it
    computes; false where a machine has little of it."""
    order: OrderConfig | None = None
    """Order of an epoch's samples; unset: blocked for a dataset in blocks, else shuffled."""
    shuffle_buffer: Annotated[int, at_least(0)] = 0
    """Of a stream: how many samples of each lane are held at once and shuffled; 0: they stay as they come."""
    missing: MissingName = "error"
    """What a sample is for which the dataset, or the stream, returns None: an error, or left out (skip)."""
    drop_last: bool = False
    """Whether to drop the partial last step of an epoch instead of weighting it; of a stream, all steps that
    some lane cannot fill."""

    @property
    def order_class(self) -> ClassConfig | None:
        """The class of the order and its arguments; None where it is unset."""
        order = self.order
        return None if order is None else ClassConfig(class_path=order.class_path, init_args=order.init_args)
