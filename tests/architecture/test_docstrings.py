"""A public method has a docstring, unless a base class or a protocol of the same method name has it."""

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src" / "lanewise"


def undocumented(sources: Sequence[str]) -> Iterator[str]:
    """Find methods without a docstring that override and implement nothing documented."""
    nodes = [node for text in sources for node in ast.walk(ast.parse(text))]
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    bases = {node.name: {name_of(base) for base in node.bases} for node in classes}
    for twins in map(members, nodes):  # of World = GroupWorld | LocalWorld one of them says it
        for name in twins & bases.keys():
            bases[name] |= twins - {name}
    documented = {
        (node.name, method.name) for node in classes for method in methods(node) if has_text(method)
    }
    protocols = {name for owner, name in documented if "Protocol" in bases[owner]}
    for node in classes:
        above: set[str] = set()
        new = bases[node.name]
        while new - above:
            above |= new
            new = {base for name in new for base in bases.get(name, ())}
        is_free = node.name.startswith("_") or above - bases.keys() - {"Protocol", "Generic", "NamedTuple"}
        for method in [] if is_free else methods(node):
            is_known = method.name in protocols or any((base, method.name) in documented for base in above)
            if not has_text(method) and not is_known:
                yield f"{node.name}.{method.name}"


def name_of(base: ast.expr) -> str:
    return ast.unparse(base).split("[")[0].split(".")[-1]


def members(node: ast.AST) -> set[str]:
    """Return the classes of a union that has a name."""
    if isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) == "TypeAlias" and node.value:
        return set(ast.unparse(node.value).split(" | "))
    return set()


def methods(node: ast.ClassDef) -> list[ast.FunctionDef]:
    found = [method for method in node.body if isinstance(method, ast.FunctionDef)]
    setters = [method for method in found if any(".setter" in ast.unparse(d) for d in method.decorator_list)]
    return [method for method in found if not method.name.startswith("_") and method not in setters]


def has_text(method: ast.FunctionDef) -> bool:
    return ast.get_docstring(method) is not None


def test_every_method_has_a_docstring_or_overrides_one_that_has() -> None:
    assert not list(undocumented([file.read_text() for file in sorted(SRC.rglob("*.py"))]))


PROTOCOL = 'class Look(Protocol):\n    def begin(self):\n        """Begin."""\n'
BASE = 'class Job:\n    def run(self):\n        """Run."""\n'


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("class Own:\n    def begin(self): ...", []),
        ("class Own:\n    def other(self): ...", ["Own.other"]),
        ("class Own(Job):\n    def run(self): ...", []),
        ("class Own(module.Job[int]):\n    def run(self): ...", []),
        ("class Own:\n    def run(self): ...", ["Own.run"]),
        ("class Own(logging.Handler):\n    def emit(self): ...", []),
        ("class Own:\n    def _other(self): ...", []),
        ("Any: TypeAlias = Own | Job\nclass Own:\n    def run(self): ...", []),
        ("class _Own:\n    def other(self): ...", []),
    ],
)
def test_the_finder_knows_what_is_overridden(source: str, found: list[str]) -> None:
    assert list(undocumented([PROTOCOL, BASE, source])) == found
