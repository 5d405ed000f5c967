"""What is imported late is listed twice, for type checkers and for python: the lists are equal."""

import ast
from pathlib import Path

import lanewise
from lanewise import data

FOLDER = Path(lanewise.__file__).parent / "data"


def classes() -> dict[str, str]:
    """The formats of files, by the class: each is in the file of the data that it reads."""
    return {
        node.name: f"lanewise.data.{file.stem}"
        for file in FOLDER.glob("*.py")
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name.endswith("Dataset") and node.name != "FileDataset"
    }


def test_a_format_of_files_is_listed():
    assert classes().items() <= data._MODULES.items()


def test_type_checkers_see_what_is_imported_late():
    """Else an editor knows no such name, or python does not."""
    (block,) = [
        node
        for node in ast.parse((FOLDER / "__init__.py").read_text(encoding="utf-8")).body
        if isinstance(node, ast.If)
    ]
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    assert {name.name: node.module for node in imports for name in node.names} == data._MODULES
