"""Lists of different lengths, as one tensor."""

from typing import NamedTuple, Union

import torch


class Ragged(NamedTuple):
    """A column of lists: all of their values one after the other, and where each list begins.

    List `i` is `values[offsets[i]:offsets[i + 1]]`. For attention over packed texts, `offsets` are the
    cumulative sequence lengths, and `torch.nested.nested_tensor_from_jagged(values, offsets)` is a view of
    the lists as a nested tensor. In a batch it moves to a device as any tuple of tensors does.
    """

    values: Union[torch.Tensor, "Ragged"]
    """[num_values], or lists again."""
    offsets: torch.Tensor
    """int64 [num_lists + 1], from 0 to num_values."""

    @property
    def lengths(self) -> torch.Tensor:
        """int64 [num_lists]: how many values each list has."""
        return self.offsets.diff()
