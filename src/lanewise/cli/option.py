"""Takes options with a value out of a command's arguments, before the rest overrides keys."""

import difflib
from collections.abc import Sequence

from lanewise.errors import ConfigError


def take_option(option: str, arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the value of an option, or None if it is not there, and the other arguments.

    Raises:
        ConfigError: if the value is missing, or the option is misspelled.
    """
    rest = list(arguments)
    if option not in rest:
        if misspelled := difflib.get_close_matches(option, rest, n=1, cutoff=0.9):
            raise ConfigError(f"{misspelled[0]} is no option. Did you mean {option}?")
        return None, rest
    index = rest.index(option)
    if index + 1 == len(rest):
        raise ConfigError(f"{option} needs a value.")
    return rest[index + 1], rest[:index] + rest[index + 2 :]
