"""The first stage of the checks makes a `RunConfig` of a file and overrides, without torch."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lanewise.config.check import expand_user, read_section, show
from lanewise.config.file import read_file
from lanewise.config.run import RunConfig
from lanewise.config.strict_yaml import read_yaml, write_yaml
from lanewise.config.tree import MOST_LEVELS
from lanewise.errors import ConfigError, collecting


class Override(NamedTuple):
    """A value that replaces one of the file; on the command line `--key text`."""

    key: str
    """Dotted: `train.seed`, or `callbacks.0.init_args` for an item of a list."""
    text: str | None
    """Read as YAML. None, where no value was given, is a mistake that is reported with the others."""


def load_config(path: str, overrides: Sequence[Override] = ()) -> RunConfig:
    """Read a configuration file, apply the overrides and check the result.

    Args:
        path: a file that ends in .yaml, .yml, .json, .toml or .jsonnet.
        overrides: applied in their order; the last for a key holds.

    Raises:
        ConfigError: lists every mistake of the overrides and of the tree.
    """
    file = Path(expand_user(path))
    of_file = read_file(file)
    if "dataset_reader" in of_file:
        raise ConfigError(
            f"{file} is a configuration of AllenNLP. Write one as docs/coming_from/allennlp.md shows, whose "
            "table says what stands for each of its keys."
        )
    tree, mistakes = apply_overrides(of_file, overrides)
    with collecting(mistakes):
        config = read_section(RunConfig, tree)
    if mistakes:
        raise ConfigError(*mistakes)
    # A path of the command line is relative to the working directory, as every other one there.
    is_typed = config.search_path is not None and any(override.key == "search_path" for override in overrides)
    base = Path.cwd() if is_typed else file.parent
    search_path = os.path.realpath(base / expand_user(config.search_path or ""))
    return dataclasses.replace(config, search_path=search_path)


def dump_config(config: RunConfig) -> str:
    """Write every value of a configuration as YAML, from which an equal configuration can be loaded."""
    return write_yaml(dataclasses.asdict(config))


def apply_overrides(
    tree: dict[str, object], overrides: Sequence[Override]
) -> tuple[dict[str, object], list[str]]:
    """Apply the overrides in their order; return the new tree and the mistakes of those that are wrong."""
    mistakes: list[str] = []
    for key, text in overrides:
        keys, option = key.split("."), f"--{key}"
        with collecting(mistakes):
            if text is None:
                raise ConfigError(f"{option} has no value. Write {option} VALUE, or {option}=VALUE.")
            if not all(keys):
                raise ConfigError(f"{option} has an empty part in its dotted key. Write --a.b.c {text}.")
            if len(keys) > MOST_LEVELS:
                raise ConfigError(f"{option} is a key of {len(keys)} parts. Write at most {MOST_LEVELS}.")
            value = read_yaml(text, source=f"the value of {option}")
            tree = _with_value(tree, keys, value)
    return tree, mistakes


def _with_value(tree: object, keys: Sequence[str], value: object, above: str = "") -> Any:
    """Copy the tree with one value set; never in place, since two keys may share a mapping (a YAML alias)."""
    if not keys:
        return value
    key, *below = keys
    if isinstance(tree, list):
        if key not in map(str, range(len(tree))):
            raise ConfigError(
                f"--{above}.{key} is not an item of {above}, which has {len(tree)}. Count them from 0."
            )
        index = int(key)
        return [*tree[:index], _with_value(tree[index], below, value, f"{above}.{key}"), *tree[index + 1 :]]
    section = {} if tree is None else tree
    if isinstance(section, str) and key in ("class_path", "init_args"):
        section = {"class_path": section}  # a class that stands alone
    if not isinstance(section, Mapping):
        raise ConfigError(
            f"--{above}.{'.'.join(keys)} is below {above}, which is {show(section)}, not a section. "
            f"Override {above} itself."
        )
    dotted = f"{above}.{key}" if above else key
    return {**section, key: _with_value(section.get(key), below, value, dotted)}
