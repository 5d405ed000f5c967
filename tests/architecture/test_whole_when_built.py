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
    "ctx": "where torch's autograd.Function keeps what its backward needs",
}
"""Of variables, and of attributes with a dot: why."""
FOREIGN = "of a library's object, or of the user's, which has no other way"
RESULT = "a record of results, filled as they come; it is read when all are there"
ALLOWED: dict[str, tuple[str, set[str]]] = {
    "adapt/optimizer.py": (FOREIGN, {"named[names[0]]._NOTED"}),
    "cli/arguments.py": ("argparse gives the namespace, which argparse has built", {"found.program"}),
    "cli/bench.py": (RESULT, {"report.changes"}),
    "cli/completion.py": (FOREIGN, {"added.choices", "added.complete"}),
    "commands/bench/bench.py": (RESULT, {"row.trained", "row.training_failure"}),
    "commands/bench/hosts.py": (RESULT, {"row.failure", "row.firsts", "row.rounds"}),
    "commands/bench/job.py": (
        "the dataset of this copy of the task is made once, outside of what is measured",
        {"task.eval_datasets", "task.train_dataset"},
    ),
    "commands/bench/warm_mode.py": (RESULT, {"row.failure", "row.firsts"}),
    "commands/doctor/doctor.py": (
        "the launcher of a config gets the project of the command line",
        {"launcher.project"},
    ),
    "commands/verify/cut.py": (FOREIGN, {"probed.model.get_submodule(owner).training"}),
    "commands/verify/foreign/on_path/lanewise_observer/hooks.py": (
        "watches a program of others from within",
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
        "watches a program of others from within",
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
        "watches a program of others from within",
        {"loader.exec_module"},
    ),
    "commands/verify/job.py": (
        RESULT,
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
    "commands/verify/metric.py": (RESULT, {"found.of_means", "found.of_micro_batches"}),
    "commands/verify/operators.py": (FOREIGN, {"switches.fill_uninitialized_memory"}),
    "commands/verify/verify.py": (RESULT, {"layout.resumed"}),
    "config/strict_yaml.py": (FOREIGN, {"_Loader.yaml_implicit_resolvers"}),
    "data/block_reader.py": ("how far a block was read, beside the block", {"kept.rows_left"}),
    "data/mixed_stream.py": (
        "which part of a mixture has ended, which only the mixture knows",
        {"other.is_over", "part.is_over"},
    ),
    "data/stream_lanes.py": (
        "what a DataLoader's sampler is asked for next",
        {"self._asked.ended", "self._asked.epoch", "self._asked.first_step"},
    ),
    "data/stream_loader.py": (
        "a batch gets its place in the step when all lanes are known; a reader where a restored run goes on",
        {"batch.data", "batch.turn", "batch.to_source", "self.reader.start"},
    ),
    "data/stream_pass.py": ("a batch gets its place in the pass when the next one is known", {"batch.turn"}),
    "data/workers.py": ("one flag of the run, which several may raise", {"length.is_asked"}),
    "engine/engine.py": (
        "callbacks are known when `fit` is called, and the step of the best model to the engine alone",
        {"self._saving.stop_reason", "self.evaluation.best_step"},
    ),
    "engine/evaluation/eval_set.py": (
        "a batch gets its place in the evaluation when the next one is known",
        {"batch.data", "self.reader.fills_empty"},
    ),
    "engine/evaluation/evaluator.py": (
        "the mode of the user's modules; and " + RESULT,
        {"module.training", "of_lane.num_samples"},
    ),
    "engine/observers.py": (FOREIGN, {"callback.logged_media"}),
    "engine/step/message.py": (
        "receive completes the totals that it has just made",
        {"totals.joined", "totals.metrics"},
    ),
    "engine/step/shared.py": (
        "what a loss of all samples tells in a step, beside what each lane adds",
        {"self._message.common_name", "self._message.find_not_finite"},
    ),
    "engine/transforms/activation_checkpointing.py": (FOREIGN, {"block.forward"}),
    "engine/transforms/checkpointed.py": (FOREIGN, {"module.forward.compares"}),
    "engine/transforms/compile.py": (FOREIGN, {"module.forward"}),
    "errors.py": (FOREIGN, {"error.__cause__", "error.__traceback__"}),
    "hugging_face/trainer.py": (FOREIGN, {"trainer.lr_scheduler", "trainer.optimizer"}),
    "hugging_face/weight.py": (RESULT, {"parts.counts", "parts.takes_count"}),
    "lanes/progress.py": ("one flag of the run, which several may raise", {"self.length.is_asked"}),
    "launch/agree.py": (RESULT, {"host.interfaces"}),
    "lightning/module.py": (FOREIGN, {"parts.metrics", "there.trainer"}),
    "lightning/step.py": (FOREIGN, {"made.forward", "made.log", "made.trainer", "metric.sync_on_compute"}),
    "metrics/merge.py": (FOREIGN, {"metric._to_sync", "metric._update_count", "metric.state"}),
    "processes/watch/meeting.py": (
        "the meeting is what starts the channel",
        {"channel.has_met", "channel.start"},
    ),
    "reduce/fsdp_group.py": (FOREIGN, {"group.post_backward"}),
    "reduce/replicas.py": (FOREIGN, {"module.name", "own.data", "own.training"}),
    "runs/checkpoint/saver.py": (FOREIGN, {"self.failure.__cause__"}),
    "runs/loggers/progress.py": (FOREIGN, {"self._column.bar_width"}),
    "runs/loggers/rank_log.py": (
        "which rank shows a warning is known when all have told",
        {"self._console.is_first"},
    ),
    "task.py": ("the arguments of a task, for the processes that build it again", {"task._init_arguments"}),
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
