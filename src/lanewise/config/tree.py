"""Which values a configuration may hold, and how many, in any format."""

from collections.abc import Mapping, MutableSequence
from types import NoneType
from typing import Any

from lanewise.errors import ConfigError

MOST_CHARACTERS = 2**20
"""Most characters of a file: far more than a configuration needs, and few enough to be read in a moment."""
MOST_LEVELS = 64
"""Most levels of mappings and lists: code that works on a tree calls itself for each of them."""
MOST_VALUES = 100_000
"""Most values in a tree; the keys of mappings are counted too."""
_MOST_DIGITS = 100  # every such number is also a float
_PLAIN = (NoneType, bool, int, float, str)


def check_tree(tree: object, source: str) -> None:
    """Check that a tree holds text, numbers, true, false, null, lists and mappings alone, and not too many.

    A value that stands in several places, by an alias of YAML, counts in each of them.

    Args:
        tree: what was read.
        source: what to call it in a mistake, for example its file name.

    Raises:
        ConfigError: at the first value that is not as it should be.
    """
    pending, num_values = [(tree, 0)], 0
    while pending:
        value, level = pending.pop()
        num_values += 1
        if num_values > MOST_VALUES:
            raise ConfigError(
                f"{source} holds more than {MOST_VALUES:,} values. Keep data in a file of its own, and give "
                "its path to the task."
            )
        if isinstance(value, Mapping | list):
            if level == MOST_LEVELS:
                raise too_deep(source)
            items = [*value, *value.values()] if isinstance(value, Mapping) else value
            pending += [(item, level + 1) for item in items]
        elif not isinstance(value, _PLAIN):
            raise ConfigError(
                f"{source} holds {value!s}, a {type(value).__name__}; a configuration holds text, numbers, "
                "true, false, null, lists and mappings. Put it into quotes."
            )
        elif isinstance(value, str):
            _check_text(value, source)
        elif isinstance(value, int) and abs(value) >= 10**_MOST_DIGITS:
            raise too_long(source)


def plain_tree(value: object) -> object:
    """Return a section that is made of another library's containers, such as Hydra's, as of dict and list."""
    if isinstance(value, Mapping):
        return {name: plain_tree(item) for name, item in value.items()}
    return [plain_tree(item) for item in value] if isinstance(value, MutableSequence) else value


def flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is in nested mappings, by keys with dots between them; an empty mapping is a value."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        inner = flat(value) if isinstance(value, Mapping) else {}
        found |= {f"{key}.{name}": one for name, one in inner.items()} or {str(key): value}
    return found


def require_few(text: str, source: str) -> None:
    """Raise ConfigError for text that is longer than a configuration may be."""
    if len(text) > MOST_CHARACTERS:
        raise ConfigError(
            f"{source} is longer than {MOST_CHARACTERS:,} characters. Keep data in a file of its own, and "
            "give its path to the task."
        )


def read_integer(text: str, source: str) -> int:
    """Read an integer, decimal or with 0o or 0x, but for one of thousands of digits, which Python refuses.

    Raises:
        ConfigError: it is longer than any number that is meant.
    """
    if len(text) > _MOST_DIGITS + 1:  # and a sign
        raise too_long(source)
    return int(text, base=0 if text[:2] in ("0o", "0x") else 10)


def too_deep(source: str) -> ConfigError:
    """Return the mistake of a tree that is nested too deep."""
    return ConfigError(f"{source} is nested more than {MOST_LEVELS} levels deep. Write it flatter.")


def too_long(source: str) -> ConfigError:
    """Return the mistake of a number of very many digits."""
    return ConfigError(
        f"{source} holds an integer of more than {_MOST_DIGITS} digits. Write a shorter one, or a float."
    )


def _check_text(text: str, source: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{source} holds text that is not Unicode: half of a surrogate pair, in {text!a}. Correct it."
        ) from error
