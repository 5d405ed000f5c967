"""The second stage of the checks imports the classes, checks their arguments, and builds the objects.

jsonargparse knows which arguments a class takes, following `**kwargs` to its parents, and what a type hint
accepts. It stops at the first error, so here every argument has a parser of its own. It also reads text as
YAML, which is undone here: the values of a configuration have types already, and "3" is not a number.
"""

import copy
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, final, get_args, get_origin

from lanewise.config.argument_field import fields_of, unknown_field
from lanewise.config.check import read_section, show, suggest
from lanewise.config.class_path import ClassConfig, resolve, resolve_class
from lanewise.config.optimizer_rules import refuse_optimizer
from lanewise.config.run import RunConfig
from lanewise.config.scheduler import length_hint
from lanewise.config.trust import named_in, refuse_unknown, refusing_imports_from
from lanewise.errors import ConfigError, LanewiseError, collecting

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

_YAML_TYPES = (NoneType, bool, int, float, list, dict)


@dataclass(frozen=True)
class _Kind:
    """What the class of a section must be. It is checked before anything of the section is built."""

    class_path: str
    """The class that it must be derived from; imported late, as it may need torch."""
    num_runtime_args: int = 0
    """How many of the first arguments of the constructor are given at run time."""
    refuse: Callable[[type], str] = lambda _: ""
    """Says why a class of this kind cannot be used, and what to do; nothing where it can be used."""
    may_be_function: bool = False
    """Whether a function may make the object, whose class is then known when it is built."""


def _refuse_task(cls: Any) -> str:
    """Return why a task has no loss, or several."""
    try:
        cls.loss_method()
    except LanewiseError as error:
        return str(error)
    return ""


_KINDS = {
    "task": _Kind("lanewise.Task", refuse=_refuse_task),
    "optimizer": _Kind(
        "torch.optim.Optimizer", num_runtime_args=1, refuse=refuse_optimizer, may_be_function=True
    ),
    "scheduler": _Kind("torch.optim.lr_scheduler.LRScheduler", num_runtime_args=1, may_be_function=True),
    "callbacks": _Kind("lanewise.Callback"),
    "data": _Kind("lanewise.lanes.SampleOrder", num_runtime_args=1),
}
_OBJECT = _Kind("builtins.object")  # inside an argument, whose type hint says what it must be


def check_classes(config: RunConfig, *, has_task: bool = False, untrusted: Sequence[str] = ()) -> None:
    """Import every class and check its arguments; nothing is built.

    Args:
        config: names the classes.
        has_task: the task is there already as an object.
        untrusted: folders that no code may come from; if there are any, what is built is limited as well.

    Raises:
        ConfigError: lists every mistake of all sections.
    """
    mistakes: list[str] = []
    inner = replace(_OBJECT, refuse=partial(refuse_unknown, config.search_path)) if untrusted else _OBJECT
    with refusing_imports_from(untrusted):
        for key, section in _sections(config):
            if has_task and key == "task":
                continue
            with collecting(mistakes):
                _bind(section, key, _kind_of(key), inner)
    if mistakes:
        raise ConfigError(*mistakes)


def build(key: str, config: ClassConfig, *runtime_args: object) -> Any:
    """Build the object of a section.

    Args:
        key: the dotted key of the section, which says what its class must be.
        config: the class and its arguments, which are converted to the types of the signature.
        runtime_args: the first arguments of the constructor, which no configuration can hold.

    Raises:
        ConfigError: lists every mistake in the class and its arguments.
    """
    return _build(key, config, _kind_of(key), *runtime_args)


def describe_classes(config: RunConfig, width: int = 100) -> str:
    """Write the help of the classes: for each argument its key, type, default and description."""

    def wrap(text: str, indent: str) -> list[str]:
        return textwrap.wrap(
            text, width, initial_indent=indent, subsequent_indent=" " * 6, break_long_words=False
        )

    lines: list[str] = []
    for key, section in _sections(config):
        constructor = _Constructor(section, key, _kind_of(key))
        lines.append(f"{key}: {section.class_path}")
        for argument in constructor.arguments.values():
            required = argument.default is argument.empty
            default = "required" if required else f"default {argument.default!r}"
            name = f"--{key}.init_args.{argument.name}"
            lines += wrap(f"{name}  {_type_name(argument.annotation)}, {default}", "  ")
            lines += wrap(constructor.descriptions.get(argument.name, ""), " " * 6)
            for field in fields_of(argument.annotation):
                lines += wrap(f"{name}.{field.name}  {_type_name(field.hint)}, {field.default}", "  ")
        lines.append("")
    return "\n".join(lines)


def _sections(config: RunConfig) -> list[tuple[str, ClassConfig]]:
    """List the sections that name a class, by their dotted keys."""
    sections = {
        "task": config.task,
        "optimizer": config.optimizer.of_class,
        "scheduler": None if config.scheduler is None else config.scheduler.of_length(1),
        "data.order": config.data.order_class,
        **{f"callbacks.{number}": section for number, section in enumerate(config.callbacks)},
    }
    return [(key, section) for key, section in sections.items() if section is not None]


def _kind_of(key: str) -> _Kind:
    return _KINDS[key.partition(".")[0]]


def _build(key: str, config: ClassConfig, kind: _Kind, *runtime_args: object) -> Any:
    constructor, values = _bind(config, key, kind)
    return constructor.cls(*runtime_args, **{name: make() for name, make in values.items()})


@final
class _Constructor:
    """A class and the arguments that it takes from a configuration.

    Args:
        config: names the class.
        key: the dotted key of `config`, for the mistakes.
        kind: what the class must be.
    """

    def __init__(self, config: ClassConfig, key: str, kind: _Kind) -> None:
        self.cls = resolve(key, config)
        self._is_function = kind.may_be_function and inspect.isfunction(self.cls)
        self.class_path = config.class_path
        self._num_runtime_args = kind.num_runtime_args
        if not self._is_function:
            _require_kind(resolve_class(key, config), config.class_path, key, kind)
        try:
            parameters = inspect.signature(self.cls).parameters
        except ValueError as error:  # some classes written in C
            raise ConfigError(
                f"{key}.class_path: {config.class_path} does not declare its arguments. "
                "Derive a class that does."
            ) from error
        self.runtime_names = list(parameters)[: kind.num_runtime_args]
        self.takes_any_name = any(
            parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()
        )
        self.arguments: dict[str, inspect.Parameter] = {}
        self.descriptions: dict[str, str] = {}  # what the docstring says about each
        # argparse has no public list of its options, nor jsonargparse one of their types.
        for action in self._parser()._actions:  # noqa: SLF001
            # A dot is in the help of a class and in the fields of a dataclass.
            if action.dest == "help" or "." in action.dest:
                continue
            # The default is the signature's: jsonargparse takes a parameter without a type for optional. Of a
            # parent's parameter, which `**kwargs` hides from the signature, jsonargparse knows it.
            default = inspect.Parameter.empty if action.required else action.default
            parameter = parameters.get(
                action.dest, inspect.Parameter(action.dest, inspect.Parameter.KEYWORD_ONLY, default=default)
            )
            hint = getattr(action, "_typehint", parameter.annotation)
            self.arguments[action.dest] = parameter.replace(annotation=hint)
            if hasattr(action, "_typehint"):
                self.descriptions[action.dest] = " ".join((action.help or "").split())

    def convert(self, name: str, value: object) -> Callable[[], object]:
        """Check one value, and return a function that makes the argument from it.

        Raises:
            ValueError: the type hint does not accept the value.
        """
        if value is None and _refuses_none(self.arguments[name].annotation):
            raise ValueError("this is null")
        parser = self._parser(only=name)
        try:
            parsed = parser.parse_object({name: copy.deepcopy(value)})  # it changes what it gets
        except Exception as error:  # a type may convert by any function
            raise ValueError from error
        if not isinstance(value, str) or type(parsed[name]) not in _YAML_TYPES:
            return lambda: parser.instantiate(parsed)[name]
        # The text was read as YAML.
        if self.accepts(name, "text"):
            return lambda: value
        raise ValueError("this is text")

    def named_freely(self, name: str, value: object) -> Iterator[Any]:
        """Yield each class and function that a value names where the type hint would accept any other."""
        parsed = self._parser(only=name).parse_object({name: copy.deepcopy(value)})[name]
        for named, other in named_in(parsed):
            if self.accepts(name, other):
                yield resolve_class(name, ClassConfig(class_path=named)) if isinstance(named, str) else named

    def accepts(self, name: str, value: object) -> bool:
        """Tell whether an argument has no type hint that refuses a value."""
        try:
            if name in self.arguments:
                self._parser(only=name).parse_object({name: value})
        except Exception:  # noqa: BLE001  # a type may convert by any function
            return False
        return True

    def _parser(self, only: str | None = None) -> "ArgumentParser":
        """Return a parser of all arguments, or of one alone."""
        others = frozenset() if only is None else frozenset(self.arguments) - {only}
        return _parser_of(self.cls, self._is_function, others | {self._num_runtime_args})


@lru_cache(256)  # it reads the source of the class and of its parents, for longer than a step takes
def _parser_of(cls: Any, is_function: bool, skip: frozenset[int | str]) -> "ArgumentParser":
    """Make a parser of what a class or function takes, without arguments by name and the first ones."""
    from jsonargparse import ArgumentParser  # takes a tenth of torch's time, and an own loop needs none

    parser = ArgumentParser(exit_on_error=False, print_config=None)
    add = parser.add_function_arguments if is_function else parser.add_class_arguments
    add(cls, fail_untyped=False, skip=set(skip))
    return parser


def _require_kind(cls: type, class_path: str, key: str, kind: _Kind) -> None:
    """Raise where a class is not what its section needs, or lacks a method that it must have.

    This is checked before its arguments are built, which may be objects with effects of their own.
    """
    if not issubclass(cls, resolve_class(key, ClassConfig(class_path=kind.class_path))):
        raise ConfigError(
            f"{key}.class_path must name a {kind.class_path}: {class_path} is not one. "
            "Name a class that is derived from it."
        )
    if inspect.isabstract(cls):
        missing = ", ".join(sorted(getattr(cls, "__abstractmethods__", ())))
        raise ConfigError(f"{key}.class_path: {class_path} does not define {missing}. Add it to the class.")
    if why := kind.refuse(cls):
        raise ConfigError(f"{key}.class_path: {class_path} cannot be used. {why}")


def _bind(
    config: ClassConfig, key: str, kind: _Kind, inner: _Kind = _OBJECT
) -> tuple[_Constructor, dict[str, Callable[[], object]]]:
    """Find the constructor, and a function that makes each of its arguments, or raise every mistake.

    Args:
        config: names the class.
        key: its dotted key.
        kind: what the class must be.
        inner: what the classes of objects inside its arguments must be.
    """
    constructor = _Constructor(config, key, kind)
    prefix = f"{key}.init_args."
    mistakes: list[str] = []
    values: dict[str, Callable[[], object]] = {}
    for name, value in config.init_args.items():
        with collecting(mistakes):
            values[name] = _bind_argument(constructor, name, value, prefix, inner)
    mistakes += [
        (
            f"{prefix}{argument.name} is missing: "
            f"{config.class_path} needs it ({_type_name(argument.annotation)}). Add it."
            f"{length_hint(argument.name) if key == 'scheduler' else ''}"
        )
        for argument in constructor.arguments.values()
        if argument.default is argument.empty and argument.name not in config.init_args
    ]
    if mistakes:
        raise ConfigError(*mistakes)
    return constructor, values


def _bind_argument(
    constructor: _Constructor, name: str, value: object, prefix: str, inner: _Kind
) -> Callable[[], object]:
    """Check one argument by name and type; an object inside it is checked the same way."""
    key = f"{prefix}{name}"
    if name in constructor.runtime_names:
        raise ConfigError(f"{key} is given to {constructor.class_path} at run time. Remove the key.")
    if name not in constructor.arguments and not constructor.takes_any_name:
        hint = suggest(name, constructor.arguments, prefix)
        raise ConfigError(f"{key} is not an argument of {constructor.class_path}. {hint}")
    is_object = isinstance(value, Mapping) and "class_path" in value
    if constructor.accepts(name, object()):
        if not is_object:
            return lambda: copy.deepcopy(value)
        nested = read_section(ClassConfig, value, key)
        _bind(nested, key, inner, inner)
        return partial(_build, key, nested, _OBJECT)
    try:
        make = constructor.convert(name, value)
    except ValueError as error:
        if is_object:
            _bind(read_section(ClassConfig, value, key), key, inner, inner)
        if mistake := unknown_field(constructor.arguments[name].annotation, value, key):
            raise ConfigError(mistake) from error
        text = ", which is text" if isinstance(value, str) else ""
        needed = _type_name(constructor.arguments[name].annotation)
        raise ConfigError(
            f"{key} must be {needed}: got {show(value)}{text}. lanewise train CONFIG --help describes it."
        ) from error
    for named in constructor.named_freely(name, value) if inner is not _OBJECT else ():
        if why := inner.refuse(named):
            raise ConfigError(f"{key}: {named.__module__}.{named.__qualname__} cannot be used. {why}")
    return make


def _refuses_none(hint: Any) -> bool:
    """Tell whether a type hint certainly excludes None, which jsonargparse accepts everywhere."""
    kind = get_origin(hint) or hint
    if kind in (Union, UnionType):
        return all(_refuses_none(option) for option in get_args(hint))
    if kind is Literal:
        return None not in get_args(hint)
    return isinstance(kind, type) and kind not in (NoneType, Annotated)


def _type_name(hint: Any) -> str:
    """Write a type hint as a user would."""
    text = inspect.formatannotation(hint)
    return "any" if "Untyped" in text else text
