"""Stage one of the checks: a file and the overrides of the command line become a `RunConfig`; no torch."""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

from lanewise.config.check import read_section
from lanewise.config.file import read_file
from lanewise.config.marks import expand_user
from lanewise.config.override import Override, apply_overrides
from lanewise.config.run import RunConfig
from lanewise.config.strict_yaml import write_yaml
from lanewise.errors import ConfigError


def load_config(path: str, overrides: Sequence[Override] = ()) -> RunConfig:
    """Read a configuration file, apply the overrides and check the result.

    Args:
        path: a file that ends in .yaml, .yml, .json, .toml or .jsonnet.
        overrides: applied in their order; the last for a key holds.

    Raises:
        ConfigError: lists every mistake of the overrides and of the tree.
    """
    file = Path(expand_user(path))
    tree, mistakes = apply_overrides(read_file(file), overrides)
    try:
        config = read_section(RunConfig, tree)
    except ConfigError as error:
        raise ConfigError(*mistakes, *error.mistakes) from None
    if mistakes:
        raise ConfigError(*mistakes)
    search_path = os.path.realpath(file.parent / expand_user(config.search_path or ""))
    return dataclasses.replace(config, search_path=search_path)


def dump_config(config: RunConfig) -> str:
    """Write every value of a configuration as YAML, which loads back to an equal one."""
    return write_yaml(dataclasses.asdict(config))
