"""Names of our modules in strings, which nothing renames with the modules: each leads to something."""

import ast
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src" / "lanewise"
NAME = re.compile(r"lanewise(?:\.\w+)+\.?")
MAY_HAVE_ONE = re.compile(r"""["'}]lanewise\.""")
"""In the text of a source; parsing those that have none takes each process that collects tests a second."""
OTHERS = {
    "lanewise.schema.json": "a file",
    "lanewise.order": "the salt of a hash",
    "lanewise.run_id": "a tag of MLflow",
    "lanewise.run_dir": "a tag of MLflow",
    "lanewise.model_sha256": "a tag of MLflow",
}


def names_in(source: str) -> Iterator[str]:
    """The dotted names that are a whole string, or a whole part of an f-string; a last dot means a prefix."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and NAME.fullmatch(node.value):
            yield node.value.removesuffix(".")


def leads_somewhere(name: str) -> bool:
    """Whether a name is that of a module, or of something in one."""
    try:
        import_module(name)
    except ModuleNotFoundError:
        module, _, attribute = name.rpartition(".")
        return hasattr(import_module(module), attribute)
    return True


SOURCES = filter(MAY_HAVE_ONE.search, (path.read_text() for path in SRC.rglob("*.py")))
NAMES = sorted({name for source in SOURCES for name in names_in(source)} - OTHERS.keys())


@pytest.mark.parametrize("name", NAMES)
def test_a_name_in_a_string_leads_to_a_module_or_into_one(name):
    assert leads_somewhere(name)


def test_the_names_that_matter_are_found():
    assert {"lanewise.reduce", "lanewise.launch.host", "lanewise.engine.run.resume", "lanewise.nn"} <= set(
        NAMES
    )


def test_a_name_that_leads_nowhere_is_found():
    names = set(names_in('f"{1} lanewise.x"; f"lanewise.lanes.{1}"; "lanewise.gone"'))
    assert names == {"lanewise.lanes", "lanewise.gone"}
    assert not leads_somewhere("lanewise.gone")
    assert leads_somewhere("lanewise.lanes.SampleOrder")
