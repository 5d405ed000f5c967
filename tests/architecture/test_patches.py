"""Nothing in torch is replaced: what is assigned to its attributes are settings."""

import ast
from pathlib import Path

import lanewise

SETTINGS = ("torch.backends.", "torch.utils.deterministic.", "torch._inductor.config.")
REPLACED = {"hooks.py: torch.autograd.backward"}
"""`lanewise verify -- PROGRAM` counts the backwards of a program that knows nothing of lanewise."""


def assigned(tree: ast.Module) -> set[str]:
    """The dotted names that a module assigns to."""
    targets: list[ast.expr] = []
    for node in ast.walk(tree):
        targets += node.targets if isinstance(node, ast.Assign) else []
        targets += [node.target] if isinstance(node, ast.AugAssign | ast.AnnAssign) else []
    return {ast.unparse(target) for target in targets if isinstance(target, ast.Attribute)}


def test_torch_is_patched_nowhere():
    """The size of a storage was once watched by a `resize_` of our own."""
    found = {
        f"{file.name}: {name}"
        for file in Path(lanewise.__file__).parent.rglob("*.py")
        for name in assigned(ast.parse(file.read_text(encoding="utf-8")))
        if name.startswith(("torch.", "nn.", "dist.")) and not name.startswith(SETTINGS)
    }
    assert found == REPLACED


def test_an_assignment_is_seen():
    assert assigned(ast.parse("torch.UntypedStorage.resize_ = note")) == {"torch.UntypedStorage.resize_"}
