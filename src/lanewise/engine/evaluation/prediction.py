"""The outputs of a micro-batch as predictions, one for each sample, which may travel to rank 0."""

from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any, NamedTuple

import torch

from lanewise.errors import TaskError
from lanewise.processes.device.nested import map_leaves, plain, structure, tensors_in
from lanewise.processes.world.encode import TensorTable, encode
from lanewise.processes.world.world import World


class Prediction(NamedTuple):
    """What the forward returned for a micro-batch, on the CPU."""

    num_samples: int
    form: str
    """What `_containers` says of it."""
    values: Any

    def split(self) -> list[Any]:
        """Return the outputs of each sample."""

        def of_sample(number: int) -> Any:
            def pick(leaf: Any) -> Any:
                # A copy, as a view would keep the whole micro-batch.
                return leaf[number].clone() if isinstance(leaf, torch.Tensor) else leaf[number]

            return map_leaves(pick, self.values, _is_leaf)

        return list(map(of_sample, range(self.num_samples)))


def take_prediction(outputs: Any, num_samples: int) -> Prediction:
    """Take the outputs of a micro-batch, in any nested containers, to the CPU.

    Raises:
        TaskError: if one does not have an entry for each sample, or cannot be sent to another process.
    """

    def take(leaf: Any) -> Any:
        got, length = type(leaf).__name__, None
        if isinstance(leaf, torch.Tensor):
            got, length = str(tuple(leaf.shape)), leaf.shape[0] if leaf.dim() else None
        elif isinstance(leaf, list | tuple):
            got, length = f"a {got} of {len(leaf)}", len(leaf)
        if length != num_samples:
            raise TaskError(
                f"an output of the model does not have one entry for each of the {num_samples} samples: "
                f"got {got}. Choose those that have by Task.predict."
            )
        return leaf.detach().cpu() if isinstance(leaf, torch.Tensor) else plain(leaf)

    of_all = map_leaves(take, outputs, _is_leaf)
    encode(plain(of_all), "outputs", TensorTable(TaskError, "predicted"))  # which refuses anything else
    return Prediction(num_samples, _containers(of_all), of_all)


def put_into(containers: Mapping[str, Any], outputs: Prediction) -> Prediction:
    """Put outputs of another process, which arrived in dicts, lists and tuples, into our own containers.

    Raises:
        TaskError: if they were in other containers, and no outputs of this process were in such ones.
    """
    if _containers(outputs.values) == outputs.form:  # they were dicts, lists and tuples
        return outputs
    if outputs.form not in containers:
        raise TaskError(
            f"some outputs of the model are in other containers than those of rank 0: {outputs.form:.200}. "
            "Return the same containers for every micro-batch, or dicts, lists and tuples."
        )
    leaves: list[Any] = []
    map_leaves(leaves.append, outputs.values, _is_leaf)
    rest = iter(leaves)
    return outputs._replace(values=map_leaves(lambda _: next(rest), containers[outputs.form], _is_leaf))


def gather_predictions(
    local: Mapping[tuple[int, int], Prediction],
    missing: Mapping[tuple[int, int], Sequence[int]],
    world: World,
) -> list[Any]:
    """Return on rank 0 the outputs of each sample, None where it is missing. Collective.

    Args:
        local: those of this process, by what micro-batches are sorted by.
        missing: the places of missing samples in their micro-batch, likewise.
        world: the processes.

    Returns:
        The outputs of all processes; an empty list on other ranks.

    Raises:
        TaskError: as `put_into`.
    """
    sent = [(place, made.num_samples, made.form, plain(made.values)) for place, made in local.items()]
    gathered = world.gather_tree((sent, list(missing.items())))
    if gathered is None:
        return []
    containers = {made.form: made.values for made in local.values()}
    outputs = {place: made.split() for place, made in local.items()}
    for of_rank, _ in gathered[1:]:
        for place, *parts in of_rank:
            outputs[tuple(place)] = put_into(containers, Prediction(*parts)).split()
    for _, of_rank in gathered:
        for place, numbers in of_rank:
            for number in numbers:  # which ascend
                outputs.setdefault(tuple(place), []).insert(number, None)
    return [output for place in sorted(outputs) for output in outputs[place]]


def _is_leaf(value: Any) -> bool:
    """Tell whether a value must have one entry for each sample: not None, and no container of such values.

    A list without tensors is a leaf, of texts for example, and so is a tuple of texts and numbers.
    """
    if isinstance(value, list):
        return next(tensors_in(value), None) is None
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return not any(map(_is_container, value))
    return value is not None and (isinstance(value, torch.Tensor) or not _is_container(value))


def _is_container(value: Any) -> bool:
    is_object = is_dataclass(value) and not isinstance(value, type)
    return is_object or isinstance(value, torch.Tensor | Mapping | list | tuple)


def _containers(values: Any) -> str:
    """Describe the containers, whatever the leaves are."""
    return structure(map_leaves(lambda _: torch.empty(0), values, _is_leaf))
