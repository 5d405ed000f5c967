"""The fields of a dataclass that is an argument of a class, such as `model: {num_layers: 4}`."""

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, NamedTuple, get_args, get_type_hints

from lanewise.config.check import suggest


class ArgumentField(NamedTuple):
    """One field, or a field of the dataclass that it is."""

    name: str
    """Dotted, without the argument's own name."""
    hint: Any
    default: str


def fields_of(hint: Any) -> Iterator[ArgumentField]:
    """Yield the fields of the dataclass in a type hint; nothing where there is none."""
    cls = _dataclass_in(hint)
    hints = {} if cls is None else get_type_hints(cls)
    for field in fields(cls) if cls is not None else ():
        if not field.init:
            continue
        default = "required" if field.default_factory is MISSING else f"default {field.default_factory}"
        if field.default is not MISSING:
            default = f"default {field.default!r}"
        inner = list(fields_of(hints[field.name]))
        if not inner:
            yield ArgumentField(field.name, hints[field.name], default)
        for part in inner:
            yield part._replace(name=f"{field.name}.{part.name}")


def unknown_field(hint: Any, value: object, key: str) -> str | None:
    """Say which key of a mapping, or of one inside it, is no field of the dataclass; None where all are."""
    cls = _dataclass_in(hint)
    if cls is None or not isinstance(value, Mapping) or "class_path" in value:
        return None
    hints, known = get_type_hints(cls), [field.name for field in fields(cls) if field.init]
    for name, inner in value.items():
        if name not in known:
            return f"{key}.{name} is not a field of {cls.__name__}. {suggest(name, known, f'{key}.')}"
        if mistake := unknown_field(hints[name], inner, f"{key}.{name}"):
            return mistake
    return None


def _dataclass_in(hint: Any) -> Any:
    """Find the only dataclass among a type hint and its options."""
    options = [kind for kind in (hint, *get_args(hint)) if isinstance(kind, type) and is_dataclass(kind)]
    return options[0] if len(options) == 1 else None
