"""The outputs of a micro-batch as predictions, one for each sample, which may travel to rank 0."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from lanewise.errors import TaskError
from lanewise.nested import map_leaves, plain, structure, tensors_in
from lanewise.world.encode import TensorTable, encode


class Prediction(NamedTuple):
    """What the forward returned for a micro-batch, on the CPU."""

    num_samples: int
    form: str
    """What `structure` says of it."""
    values: Any

    def split(self) -> list[Any]:
        """Return the outputs of each sample."""

        def of_sample(number: int) -> Any:
            # A copy, as a view would keep the whole micro-batch.
            return map_leaves(lambda leaf: leaf[number].clone(), self.values)

        return list(map(of_sample, range(self.num_samples)))


def take_prediction(outputs: Any, num_samples: int) -> Prediction:
    """Take the outputs of a micro-batch, in any nested containers, to the CPU.

    Raises:
        TaskError: if one does not have an entry for each sample, or cannot be sent to another process.
    """

    def on_cpu(leaf: Any) -> torch.Tensor:
        if not isinstance(leaf, torch.Tensor) or leaf.shape[:1] != (num_samples,):
            got = tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else type(leaf).__name__
            raise TaskError(
                f"an output of the model does not have one entry for each of the {num_samples} samples: "
                f"got {got}. Choose those that have by Task.predict."
            )
        return leaf.cpu()

    of_all = map_leaves(on_cpu, outputs)
    encode(plain(of_all), "outputs", TensorTable(TaskError, "predicted"))  # which refuses anything else
    return Prediction(num_samples, structure(of_all), of_all)


def put_into(containers: Mapping[str, Any], outputs: Prediction) -> Prediction:
    """Put outputs of another process, which arrived in dicts, lists and tuples, into our own containers.

    Raises:
        TaskError: if they were in other containers, and no outputs of this process were in such ones.
    """
    if structure(outputs.values) == outputs.form:  # they were dicts, lists and tuples
        return outputs
    if outputs.form not in containers:
        raise TaskError(
            f"some outputs of the model are in other containers than those of rank 0: {outputs.form:.200}. "
            "Return the same containers for every micro-batch, or dicts, lists and tuples."
        )
    tensors = tensors_in(outputs.values)
    return outputs._replace(values=map_leaves(lambda _: next(tensors), containers[outputs.form]))
