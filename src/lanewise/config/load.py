"""Stage one of the checks: a file and the overrides of the command line become a `RunConfig`; no torch."""

import dataclasses
import difflib
import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lanewise.config.check import read_section, show
from lanewise.config.run import RunConfig
from lanewise.config.strict_yaml import read_yaml, write_yaml
from lanewise.errors import ConfigError


def load_config(path: str, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a configuration file, apply the overrides and check the result.

    Args:
        path: a file that ends in .yaml, .yml, .json, .toml or .jsonnet.
        overrides: the rest of the command line, `--a.b.c value` or `--a.b.c=value`; the last for a key holds.

    Raises:
        ConfigError: lists every mistake of the overrides and of the tree.
    """
    tree = _read_file(Path(path))
    tree, mistakes = _override(tree, overrides)
    search_path = tree.get("search_path")
    if search_path is None or isinstance(search_path, str):
        tree = {**tree, "search_path": str((Path(path).parent / (search_path or "")).resolve())}
    try:
        config = read_section(RunConfig, tree)
    except ConfigError as error:
        raise ConfigError(*mistakes, *error.mistakes) from None
    if mistakes:
        raise ConfigError(*mistakes)
    return config


def dump_config(config: RunConfig) -> str:
    """Write every value of a configuration as YAML, which loads back to an equal one."""
    return write_yaml(dataclasses.asdict(config))


def _read_file(path: Path) -> dict[str, object]:
    """Read the tree of a file by its ending."""
    read = _READERS.get(path.suffix)
    if read is None:
        endings = ", ".join(_READERS)
        raise ConfigError(
            f"{path} has an ending that is no known format: need one of {endings}. Rename the file."
        )
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        siblings = [file.name for file in path.parent.glob("*") if file.suffix in _READERS]
        near = difflib.get_close_matches(path.name, siblings, n=1)
        hint = f"Did you mean {near[0]}?" if near else f"Looked in {path.parent.resolve()}."
        raise ConfigError(f"the configuration file {path} does not exist. {hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}. Give a readable text file in UTF-8.") from error
    tree = read(text, str(path))
    if not isinstance(tree, dict):
        raise ConfigError(
            f"{path} must hold a mapping of keys to values: got {show(tree)}. Begin with task: ..."
        )
    return tree


def _read_json(text: str, source: str) -> object:
    repeated: list[str] = []

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        names = [name for name, _ in pairs]
        repeated.extend(name for index, name in enumerate(names) if name in names[:index])
        return dict(pairs)

    try:
        tree: object = json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{source}, line {error.lineno}, column {error.colno} is not valid JSON: {error.msg}."
        ) from error
    if repeated:
        raise ConfigError(
            *(f"{source} has the key {name} twice in one mapping. Remove one of them." for name in repeated)
        )
    return tree


def _read_toml(text: str, source: str) -> object:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source} is not valid TOML: {error}.") from error


def _read_jsonnet(text: str, source: str) -> object:
    try:
        import _jsonnet  # type: ignore[import-not-found, unused-ignore]  # an optional dependency
    except ImportError as error:
        raise ConfigError(
            f"{source} needs the jsonnet package, which is missing. Run: pip install lanewise[jsonnet]"
        ) from error
    try:
        return json.loads(_jsonnet.evaluate_snippet(source, text))
    except RuntimeError as error:
        raise ConfigError(f"{source} is not valid Jsonnet: {' '.join(str(error).split())}.") from error


_READERS = {
    ".yaml": read_yaml,
    ".yml": read_yaml,
    ".json": _read_json,
    ".toml": _read_toml,
    ".jsonnet": _read_jsonnet,
}


def _override(tree: dict[str, object], overrides: Sequence[str]) -> tuple[dict[str, object], list[str]]:
    """Apply the overrides in their order; return the new tree and the mistakes of those that are wrong."""
    mistakes: list[str] = []
    rest = list(overrides)
    while rest:
        option, equals, text = rest.pop(0).partition("=")
        keys = option.removeprefix("--").split(".")
        if not option.startswith("--"):
            mistakes.append(f"{option} is not an override: it must start with --. Write --a.b.c value.")
            continue
        if not equals and (not rest or rest[0].startswith("--")):
            mistakes.append(f"{option} has no value. Write {option} VALUE, or {option}=VALUE.")
            continue
        text = text if equals else rest.pop(0)
        if not all(keys):
            mistakes.append(f"{option} has an empty part in its dotted key. Write --a.b.c {text}.")
            continue
        try:
            tree = _with_value(tree, keys, read_yaml(text, source=f"the value of {option}"))
        except ConfigError as error:
            mistakes += error.mistakes
    return tree, mistakes


def _with_value(tree: object, keys: Sequence[str], value: object, above: str = "") -> Any:
    """Copy the tree with one value set; never in place, since two keys may share a mapping (a YAML alias)."""
    if not keys:
        return value
    key, *below = keys
    if isinstance(tree, list):
        if not key.isdecimal() or int(key) >= len(tree):
            raise ConfigError(
                f"--{above}.{key} is no item of {above}, which has {len(tree)}. Count them from 0."
            )
        index = int(key)
        return [*tree[:index], _with_value(tree[index], below, value, f"{above}.{key}"), *tree[index + 1 :]]
    section = {} if tree is None else tree
    if not isinstance(section, Mapping):
        mistake = (
            f"--{above}.{'.'.join(keys)} is below {above}, which is {show(section)} and no section. "
            f"Override {above} itself."
        )
        raise ConfigError(mistake)
    dotted = f"{above}.{key}" if above else key
    return {**section, key: _with_value(section.get(key), below, value, dotted)}
