"""`lanewise completion SHELL`."""

import argparse
from collections.abc import Iterator
from typing import Any

from lanewise.cli.arguments import Argument, Arguments, Command, read_path
from lanewise.config import RunConfig
from lanewise.config.check import Section
from lanewise.config.describe import describe_section

_SHELLS = ("bash", "zsh")


def _read_shell(text: str) -> str:
    if text not in _SHELLS:
        raise ValueError(f"be one of {', '.join(_SHELLS)}")
    return text


_IF_SOURCED = """\
if [[ $zsh_eval_context[-1] != loadautofunc ]]; then
  (( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
"""

_SHELL = Argument("SHELL", "bash or zsh", read=_read_shell)


def completion(arguments: Arguments) -> int:
    """Print a script that completes commands, options and keys."""
    import shtab

    from lanewise.cli.main import COMMANDS, find_command

    parser = argparse.ArgumentParser(prog="lanewise")
    commands = parser.add_subparsers()
    for name, (_, purpose) in COMMANDS.items():
        command = find_command(name)
        of_command = commands.add_parser(name, help=purpose)
        for argument in (*command.operands, *command.options):
            _add(of_command, argument)
        for key, meaning in _keys(RunConfig) if command.has_overrides else ():
            of_command.add_argument(f"--{key}", help=meaning.replace("%", "%%"))
    script = shtab.complete(parser, arguments[_SHELL])
    # shtab knows `eval` and the folders of zsh's functions, but not `source`, nor a shell without completion.
    script = script.replace("if [[ $zsh_eval_context[-1] == eval ]]; then\n", _IF_SOURCED)
    print(script)
    return 0


def _add(parser: argparse.ArgumentParser, declared: Argument[Any]) -> None:
    import shtab

    is_flag = declared.name.startswith("--") and not declared.value_name
    added = parser.add_argument(
        declared.name, help=declared.meaning, action="store_true" if is_flag else "store"
    )
    if declared.read is read_path or declared.name == "CONFIG":
        added.complete = shtab.FILE  # type: ignore[attr-defined]  # shtab reads it
    elif declared is _SHELL:
        added.choices = _SHELLS


def _keys(cls: type[Section], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted keys of a section that have values, and those below, with what they mean."""
    for key in describe_section(cls):
        name = f"{prefix}{key.name}"
        if key.section is None or key.is_list:
            yield name, key.meaning
        else:
            yield from _keys(key.section, f"{name}.")


COMMAND = Command(
    name="completion",
    text="""\
Prints a script by which a shell completes commands, options and keys of a configuration:

  source <(lanewise completion bash)
  lanewise completion bash > ~/.local/share/bash-completion/completions/lanewise
  lanewise completion zsh > ~/.zfunc/_lanewise""",
    run=completion,
    operands=(_SHELL,),
)
