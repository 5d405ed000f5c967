"""Gives a new model the weights of a file or of another run."""

import fnmatch
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import nn

from lanewise.config import InitFromConfig
from lanewise.errors import CheckpointError
from lanewise.runs.checkpoint.model_file import grow_buffers, grown_buffers, read_model, unequal_ties
from lanewise.runs.file import open_regular, reading
from lanewise.runs.report.weights import find_weights

logger = logging.getLogger(__name__)


def init_model(model: nn.Module, config: InitFromConfig | str, rank: int) -> None:
    """Copy the weights that `train.init_from` names into a model; rank 0 logs which are missing or not used.

    Args:
        model: new, on the CPU.
        config: which weights, and what they are called in the model; or their path alone.
        rank: of this process.

    Raises:
        CheckpointError: if there are no such weights, none is of the model, or one has another shape; or if
            `leave_out` or `prefixes` fit no name; or if tied weights have unequal values.
    """
    if isinstance(config, str):
        config = InitFromConfig(path=config)
    file = _find(Path(config.path).expanduser())
    found = read_model(file) if file.suffix == ".safetensors" else _read_torch(file)
    saved = {_renamed(name, config.prefixes): tensor for name, tensor in found.items()}
    # The tensors themselves, since tied ones are one.
    state = model.state_dict(keep_vars=True) | grown_buffers(model, saved)
    current = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    fitting = {pattern: fnmatch.filter({*current, *saved}, pattern) for pattern in config.leave_out}
    left_out = {name for names in fitting.values() for name in names}
    unused = [old for old in config.prefixes if not any(name.startswith(old) for name in found)]
    unused += [pattern for pattern, names in fitting.items() if not names]
    kept = {name: value for name, value in current.items() if name not in left_out}
    given = {name: saved[name] for name in kept if name in saved}
    if unused or not given:
        what = f"fits {', '.join(map(repr, unused))}" if unused else "is in both"
        raise CheckpointError(
            f"train.init_from: no name {what}. In {file} there are {_listed(found)}; in the model "
            f"{_listed(current)}. prefixes says what stands for the beginning of a name ({{module.: ''}}), "
            "and leave_out which weights stay new ([head.*])."
        )
    if differing := [name for name, value in given.items() if value.shape != kept[name].shape]:
        shapes = [f"{name} {tuple(given[name].shape)} and {tuple(kept[name].shape)}" for name in differing]
        raise CheckpointError(
            f"{file} has weights of other shapes than the model: {'; '.join(shapes)}. To leave them new: "
            f"train.init_from.leave_out=[{', '.join(differing)}]."
        )
    if unequal := unequal_ties(kept, given):
        raise CheckpointError(
            f"{file} has unequal values for weights that the model ties: {'; '.join(unequal)}. Say which one "
            f"does not count: train.init_from.leave_out=[{unequal[0].rpartition(' ')[2]}]."
        )
    grow_buffers(model, given)
    with torch.no_grad():
        for name, value in given.items():
            kept[name].copy_(value)
    filled = {kept[name] for name in given}
    missing = [name for name, value in kept.items() if value not in filled]
    unknown = [name for name in saved if name not in current and name not in left_out]
    if rank == 0:
        text = f"the run begins with {len(given)} weights of {file}"
        text += f"; new, as they are not in it: {_listed(missing)}" if missing else ""
        text += f"; not used, as they are not in the model: {_listed(unknown)}" if unknown else ""
        logger.log(logging.WARNING if missing or unknown else logging.INFO, "%s", text)


def _find(path: Path) -> Path:
    """Return the file of weights that a path names; of a run the one that `evaluate` takes."""
    file = find_weights(path)[0] if path.is_dir() else path
    if file.exists():
        return file
    raise CheckpointError(
        f"train.init_from: there is no {file}. Name the folder of a run that has ended, or a file of "
        "weights, such as RUN_DIR/best.safetensors."
    )


def _read_torch(file: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a file of torch.save by name: a state dict, or the only one in a checkpoint.

    Nothing in the file can run code.
    """
    with reading(file):
        open_regular(file.resolve()).close()  # a pipe would be waited for
        try:
            tree = torch.load(file, map_location="cpu", weights_only=True)
        except UnpicklingError as error:
            raise CheckpointError(
                f"{file} is no file of torch.save, or has more in it than tensors and plain values, which is "
                "not read, since it could run code. Save model.state_dict() alone."
            ) from error
    entries = tree.values() if isinstance(tree, Mapping) else ()
    states = list(filter(None, map(_tensors_of, [tree, *entries])))
    if len(states) != 1:
        raise CheckpointError(
            f"{file} must have one mapping of names to tensors, as model.state_dict() is: it has "
            f"{len(states)}. Save the one that is meant in a file of its own."
        )
    return states[0]


def _tensors_of(tree: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a state dict, which may have extra state; of anything else nothing."""
    named = dict(tree) if isinstance(tree, Mapping) else {}
    tensors = {name: value for name, value in named.items() if isinstance(value, torch.Tensor)}
    return tensors if all(str(name).endswith("_extra_state") for name in named.keys() - tensors) else {}


def _renamed(name: str, prefixes: Mapping[str, Any]) -> str:
    """Return the name that a tensor of the file has in the model."""
    old = max(filter(name.startswith, prefixes), key=len, default="")
    return f"{prefixes.get(old) or ''}{name.removeprefix(old)}"


def _listed(names: Iterable[str]) -> str:
    """List names, or the first five of them where there are more."""
    first, more = list(names)[:5], list(names)[5:]
    return ", ".join(first) + (f" and {len(more):,} more" if more else "")
