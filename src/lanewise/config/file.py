"""Reads the tree of a configuration file, in one of four formats."""

import json
import re
import stat
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path

from lanewise.config.check import nearest, show
from lanewise.config.jsonnet import evaluate_jsonnet
from lanewise.config.strict_yaml import read_yaml
from lanewise.config.tree import (
    MOST_CHARACTERS,
    MOST_LEVELS,
    check_tree,
    read_integer,
    require_few,
    too_deep,
    too_long,
)
from lanewise.errors import ConfigError

# For a dotted key tomllib takes memory by the square of its parts.
_TOO_DEEP_KEY = re.compile(
    rf"""(?<![\w.-])(?:([\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){{{MOST_LEVELS}}}"""
)


def read_file(path: Path) -> dict[str, object]:
    """Read the tree of a file by its ending.

    Raises:
        ConfigError: the file cannot be read, or does not hold a mapping of plain values.
    """
    if path.is_dir():
        inside = next(
            (file for file in sorted(path.glob("*")) if file.suffix in READERS), path / "CONFIG.yaml"
        )
        raise ConfigError(f"{path} is a folder. Name the configuration in it, as in {inside}.")
    read = READERS.get(path.suffix)
    if read is None:
        endings = ", ".join(READERS)
        raise ConfigError(f"{path} has an unknown ending: need one of {endings}. Rename the file.")
    source = str(path)
    try:
        tree = read(_read_text(path), source)
    except RecursionError:
        raise too_deep(source) from None
    if not isinstance(tree, dict):
        raise ConfigError(
            f"{path} must hold a mapping of keys to values: got {show(tree)}. Begin with task: ..."
        )
    return tree


def _read_text(path: Path) -> str:
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ConfigError(f"{path} cannot be read: it is not a regular file. Name a text file in UTF-8.")
        with path.open(encoding="utf-8-sig") as file:
            text = file.read(MOST_CHARACTERS + 1)
    except FileNotFoundError:
        siblings = {file.stem: file.name for file in path.parent.glob("*") if file.suffix in READERS}
        near = nearest(path.stem, siblings, cutoff=0.6)
        hint = f"Did you mean {siblings[near]}?" if near else f"Looked in {path.parent.resolve()}."
        raise ConfigError(f"the configuration file {path} does not exist. {hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}. Give a readable text file in UTF-8.") from error
    require_few(text, str(path))
    return text


def _read_json(text: str, source: str) -> object:
    repeated: list[str] = []

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        mapping: dict[str, object] = {}
        for name, value in pairs:
            if name in mapping:
                repeated.append(name)
            mapping[name] = value
        return mapping

    try:
        tree: object = json.loads(
            text, object_pairs_hook=unique, parse_int=partial(read_integer, source=source)
        )
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{source}, line {error.lineno}, column {error.colno} is not valid JSON: {error.msg}."
        ) from error
    if repeated:
        raise ConfigError(
            *(f"{source} has the key {name} twice in one mapping. Remove one of them." for name in repeated)
        )
    check_tree(tree, source)
    return tree


def _read_toml(text: str, source: str) -> object:
    if _TOO_DEEP_KEY.search(text):
        raise too_deep(source)
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source} is not valid TOML: {error}.") from error
    except ValueError:  # Python reads no integer of thousands of digits
        raise too_long(source) from None
    check_tree(tree, source)
    return tree


def _read_jsonnet(text: str, source: str) -> object:
    evaluated = evaluate_jsonnet(text, source)
    require_few(evaluated, source)
    return _read_json(evaluated, source)


READERS: dict[str, Callable[[str, str], object]] = {
    ".yaml": read_yaml,
    ".yml": read_yaml,
    ".json": _read_json,
    ".toml": _read_toml,
    ".jsonnet": _read_jsonnet,
}
