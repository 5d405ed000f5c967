"""No code sets an attribute of an object that was built elsewhere: what an object needs is given to it.

Whoever reads a class then knows all that its objects can be. Free are: an object that the same function has
built, a setting of an imported module, whose only place it is, and names that are made to be set. What else
stays is listed with its reason. The finder is tested on fake sources.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src" / "lanewise"
MADE_TO_BE_SET = {
    "heartbeat": "the note of what this process does, which is one for all",
    ".grad": "where torch keeps a gradient",
    ".training": "the mode of a module of torch's",
    ".forward": "what torch calls as a module, or as a part of one",
    ".__cause__": "Python's field of an error",
    ".__traceback__": "Python's field of an error",
    "ctx": "where torch's autograd.Function keeps what its backward needs",
}
"""Of variables, and of attributes with a dot: why."""
ALLOWED: dict[str, tuple[str, set[str]]] = {
    "adapt/optimizer.py": ("a mark on the user's parameter", {"named[names[0]]._NOTED"}),
    "cli/arguments.py": ("argparse makes the namespace", {"found.program"}),
    "cli/completion.py": ("argparse actions have no other way", {"added.choices", "added.complete"}),
    "commands/bench/bench.py": ("results are filled as measured", {"row.trained", "row.training_failure"}),
    "commands/bench/job.py": (
        "datasets are made before measuring",
        {"task.eval_datasets", "task.train_dataset"},
    ),
    "commands/bench/warm_mode.py": ("results are filled as measured", {"row.failure", "row.firsts"}),
    "commands/verify/foreign/on_path/lanewise_observer/hooks.py": (
        "observes a program from within",
        {
            "functional.batch_norm",
            "functional.name",
            "functional.scaled_dot_product_attention",
            "iterator.__init__",
            "iterator.__next__",
            "iterator._next_index",
            "iterator._reset",
            "observer.is_in_backward",
            "optimizers.add_param_group",
        },
    ),
    "commands/verify/foreign/on_path/lanewise_observer/observer.py": (
        "observes a program from within",
        {
            "held.is_ended",
            "held.num_taken",
            "iterator.lanewise_pass",
            "iterator.lanewise_pass.reshuffles",
            "module.dropout",
            "self._current.is_training",
        },
    ),
    "commands/verify/foreign/on_path/sitecustomize.py": (
        "observes a program from within",
        {"loader.exec_module"},
    ),
    "commands/verify/job.py": (
        "partial results survive an error",
        {
            "result.close",
            "result.cut",
            "result.error",
            "result.metrics",
            "result.probe",
            "result.trace",
            "result.updates",
        },
    ),
    "commands/verify/metric.py": (
        "findings are filled as probed",
        {"found.of_means", "found.of_micro_batches"},
    ),
    "engine/engine.py": (
        "known in `fit`; the step of the best",
        {"self._saving.stop_reason", "self.evaluation.best_step"},
    ),
    "engine/observers.py": ("a callback is the user's object", {"callback.logged_media"}),
    "hugging_face/trainer.py": (
        "the Trainer reads its own fields",
        {"trainer.lr_scheduler", "trainer.optimizer"},
    ),
    "hugging_face/weight.py": ("found by looking at samples", {"parts.counts", "parts.takes_count"}),
    "launch/agree.py": ("hosts answer after being reached", {"host.interfaces", "host.first_rank"}),
    "lightning/module.py": ("Lightning reads its own fields", {"parts.metrics", "there.trainer"}),
    "lightning/step.py": (
        "Lightning reads its own fields",
        {"made.log", "made.trainer", "metric.sync_on_compute"},
    ),
    "metrics/merge.py": (
        "torchmetrics has no other way",
        {"metric._to_sync", "metric._update_count", "metric.state"},
    ),
    "reduce/fsdp_group.py": ("FSDP calls its own field", {"group.post_backward"}),
    "reduce/replicas.py": ("a copy's tensors", {"module.name", "own.data"}),
    "runs/loggers/progress.py": ("rich has no other way", {"self._column.bar_width"}),
    "task.py": ("a user's task may be frozen", {"task._init_arguments"}),
}
"""Of each module: why, and what it sets."""


def imported(tree: ast.Module) -> set[str]:
    """The names that stand for modules, or for something of another package."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("lanewise"):
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def built_in(function: ast.AST) -> set[str]:
    """The variables to which a function assigns an object of a class, which it builds there."""
    names: set[str] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and isinstance(node.value, ast.Call):
            called = ast.unparse(node.value.func).rpartition(".")[2]
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if called.lstrip("_")[:1].isupper() or called in ("cls", "copy", "replace"):
                names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def targets_of(node: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    """The objects of which a statement sets an attribute, and its name."""
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
        yield node.value, node.attr
    elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "object.__setattr__"):
        yield node.args[0], ast.unparse(node.args[1]).strip("'")


def set_from_outside(source: str) -> set[str]:
    """What a module sets of objects that it did not build in the same function."""
    tree = ast.parse(source)
    free = {"self", "cls", *imported(tree)}
    found: set[str] = set()

    def look(node: ast.AST, known: set[str]) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            known = known | built_in(node)
        for owner, name in targets_of(node):
            root = ast.unparse(owner)
            is_free = root in known or f".{name}" in MADE_TO_BE_SET or root in MADE_TO_BE_SET
            is_module = root.partition(".")[0] in free - {"self", "cls"}
            if not (is_free or is_module):
                found.add(f"{root}.{name}")
        for child in ast.iter_child_nodes(node):
            look(child, known)

    look(tree, free)
    return found


def test_objects_are_whole_when_they_are_built() -> None:
    found = {
        str(path.relative_to(SRC)): set_from_outside(path.read_text(encoding="utf-8"))
        for path in SRC.rglob("*.py")
    }
    assert {path: names for path, names in found.items() if names} == {
        path: names for path, (_, names) in ALLOWED.items()
    }


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("class A:\n    def f(self):\n        self.x = 1\n", set()),
        ("def f():\n    a = Row()\n    a.x = 1\n    return a\n", set()),
        ("def f():\n    a = find()\n    a.x = 1\n", {"a.x"}),
        ("def f(a):\n    a.b.x += 1\n", {"a.b.x"}),
        ("def f(a):\n    a.x, b = 1, 2\n", {"a.x"}),
        ("def f(a):\n    setattr(a, 'x', 1)\n", {"a.x"}),
        ("class A:\n    def f(self):\n        self.part.x: int = 1\n", {"self.part.x"}),
        ("import torch\ndef f():\n    torch.backends.x = 1\n", set()),
        ("from lanewise.a import b\ndef f():\n    b.x = 1\n", {"b.x"}),
        ("def f(weight):\n    weight.grad = None\n", set()),
    ],
)
def test_the_finder(source: str, expected: set[str]) -> None:
    assert set_from_outside(source) == expected
