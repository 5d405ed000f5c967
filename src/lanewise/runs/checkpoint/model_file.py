"""Writes a model's weights to a safetensors file, whole or not at all, and reads them back."""

import json
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from lanewise.errors import CheckpointError
from lanewise.processes.device.tensor_bytes import tensor_bytes
from lanewise.processes.watch.heartbeat import heartbeat
from lanewise.processes.world.encode import TensorTable, real_view
from lanewise.processes.world.shards import is_sharded, whole
from lanewise.runs.checkpoint.part import file_header
from lanewise.runs.file import open_regular, reading, replacing

logger = logging.getLogger(__name__)


def save_model(model: nn.Module, path: Path, rank: int = 0) -> None:
    """Write a model's parameters and buffers under the plain module's names on rank 0; see `save_tensors`.

    Extra state that is not a tensor is left out of the file, and a warning names it.

    Collective if the model is sharded: every rank must call this.
    """
    tensors: dict[str, torch.Tensor] = {}
    gathered: dict[torch.Tensor, torch.Tensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if is_sharded(value):
            if value not in gathered:  # a tied one stays so
                whole_value = whole(value)
                gathered[value] = whole_value.cpu() if rank == 0 else value
            tensors[name] = gathered[value]
        elif isinstance(value, torch.Tensor):
            tensors[name] = value.detach()
        elif rank == 0:
            logger.warning("%s is not written to %s, since it is not a tensor", name, path.name)
    if rank == 0:
        save_tensors(tensors, path)


def save_tensors(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write tensors to a safetensors file, which appears under its name when it is complete and on disk.

    A tied tensor is written once, under its first name; the metadata's `aliases` is a JSON object that gives
    its first name for each other one. A complex tensor is written as pairs of real numbers, which are an
    additional last dimension; the metadata's `complex` is a JSON list of the names of such tensors.

    Args:
        tensors: by name.
        path: the file to make or replace.

    Raises:
        CheckpointError: names a tensor that the format cannot hold.
        StorageError: if the file cannot be written.
    """
    table = TensorTable()
    views = {name: real_view(tensor) if tensor.is_complex() else tensor for name, tensor in tensors.items()}
    first_names = {name: table.add(name, view) for name, view in views.items()}
    lists = {
        "aliases": {name: first for name, first in first_names.items() if first != name},
        "complex": [name for name, tensor in tensors.items() if tensor.is_complex()],
    }
    header, places = file_header(table, {key: json.dumps(value) for key, value in lists.items() if value})
    with replacing(path) as new, new.open("xb") as file:
        file.write(header)
        for name in places:
            file.write(tensor_bytes(table[name]))
            heartbeat.num_pieces += 1
        file.flush()
        os.fsync(file.fileno())


def read_model(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a safetensors file by name; of one that `save_model` wrote also tied ones.

    Raises:
        CheckpointError: if there is no such file, or it is not whole.
    """
    with reading(path):
        try:
            open_regular(path.resolve()).close()  # a pipe would be waited for
        except FileNotFoundError:
            raise CheckpointError(f"there is no {path}. Name the run_dir of a run that has ended.") from None
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
            metadata: dict[str, str] = file.metadata() or {}
        aliases: dict[str, str] = json.loads(metadata.get("aliases", "{}"))
        tensors |= {alias: tensors[name] for alias, name in aliases.items()}
        for name in json.loads(metadata.get("complex", "[]")):
            tensors[name] = torch.view_as_complex(tensors[name])
        return tensors


def load_model(model: nn.Module, path: Path) -> None:
    """Copy the weights of `save_model` into a module, whose own storage stays.

    Raises:
        CheckpointError: if there is no such file, it is not whole, or it is of another model.
    """
    tensors = read_model(path)
    state = model.state_dict(keep_vars=True) | grown_buffers(model, tensors)
    current = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    mistakes = [f"{name} is not in the file" for name in current.keys() - tensors.keys()]
    mistakes += [f"{name} is not in the model" for name in tensors.keys() - current.keys()]
    mistakes += [
        f"{name} is {tuple(tensors[name].shape)} in the file and {tuple(current[name].shape)} in the model"
        for name in current.keys() & tensors.keys()
        if tensors[name].shape != current[name].shape
    ]
    mistakes += [
        f"{names} are one tensor of the model, and unequal" for names in unequal_ties(current, tensors)
    ]
    if mistakes:
        raise CheckpointError(f"{path} is of another model: {'; '.join(sorted(mistakes))}.")
    grow_buffers(model, tensors)
    with torch.no_grad():
        for name, value in current.items():
            value.copy_(tensors[name])


def unequal_ties(current: Mapping[str, torch.Tensor], given: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the pairs of names of one tensor of a model for which unequal values are given.

    Args:
        current: the tensors of the model themselves, since tied ones are one.
        given: the values, by name.
    """
    first: dict[torch.Tensor, str] = {}
    return [
        f"{first[value]} and {name}"
        for name, value in current.items()
        if name in given
        and given[first.setdefault(value, name)] is not given[name]
        and not torch.equal(given[first[value]], given[name])
    ]


def grown_buffers(module: nn.Module, saved: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the buffers of a saved state that have elements there and none in the module.

    Such buffers are None or empty in a new module and grow in its first step, as those of observers do.
    """
    return {name: value for name, value, _, _ in _find(module, saved)}


def grow_buffers(module: nn.Module, saved: Mapping[str, Any]) -> None:
    """Give a module the buffers that `grown_buffers` returns."""
    device = next((parameter.device for parameter in module.parameters()), None)
    for _, value, owner, key in list(_find(module, saved)):
        owner._buffers[key] = value.detach().to(device, copy=True)


def _find(module: nn.Module, saved: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor, nn.Module, str]]:
    for prefix, owner in module.named_modules():
        for key, current in owner._buffers.items():
            name = f"{prefix}.{key}" if prefix else key
            value = saved.get(name)
            if isinstance(value, torch.Tensor) and value.numel() and (current is None or not current.numel()):
                yield name, value, owner, key
