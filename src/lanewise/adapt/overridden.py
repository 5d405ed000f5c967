"""What an object has of its own in place of its library's methods, which a run would not call."""

from collections.abc import Iterable
from inspect import getattr_static


def overridden(instance: object, base: type, allowed: Iterable[str]) -> list[str]:
    """Return the names of what an object has of its own in place of a base class's methods and properties.

    Args:
        instance: of a class that is derived from the base class.
        base: the class.
        allowed: names that may be overridden.
    """
    return sorted(
        name
        for name in dir(base)
        if not name.startswith("__")
        and name not in allowed
        and (callable(getattr(base, name)) or isinstance(getattr(base, name), property))
        and (name in vars(instance) or getattr_static(type(instance), name) is not getattr_static(base, name))
    )
