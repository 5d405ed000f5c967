"""Nothing that another process sent is unpickled, as it could be anybody's; the checker is tested as well."""

import ast
import re
from collections.abc import Iterator

import pytest

from tests.architecture.test_layers import SRC, read_sources

OWN_FILES = {
    "lanewise.commands.jobs.batch": "the job, in a file that only its submitter can write",
    "lanewise.commands.jobs.rank": (
        "the job, in the private folder of the parent: its own, or what its launcher sent"
    ),
    "lanewise.commands.jobs.start": "the result of its own worker on this machine, in its private folder",
    "lanewise.testing.distributed": "results of its own processes, in its private folder",
    "lanewise.testing.worker": "the call from the parent, in its private folder",
    "lanewise.commands.verify.job": (
        "results of the ranks of one machine, in the private folder of their parent"
    ),
}
"""The modules that unpickle, and whose files these are. Nothing is unpickled that came through a socket."""

OBJECTS = re.compile(r"(all_gather|gather|broadcast|scatter|send|recv)_object(_list)?(_\w+)?")
"""torch's collectives that unpickle what arrives."""
UNPICKLERS = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
READS = {"load", "loads", "Unpickler", "open"}
SENDERS = {"Client", "Listener", "Pipe", "Manager", "BaseManager"}
"""Of multiprocessing: their `recv` unpickles."""


def unpickling(source: str) -> Iterator[str]:
    """Yield each name in a source that unpickles, as it is written there."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            module = (node.module or "").partition(".")[0]
            names = {alias.name for alias in node.names}
            if module in UNPICKLERS:
                yield from names & READS
            if module == "multiprocessing":
                yield from names & SENDERS
            yield from filter(OBJECTS.fullmatch, names)
        elif isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            is_unpickler = owner in UNPICKLERS and node.attr in READS
            is_sender = owner.startswith("multiprocessing") and node.attr in SENDERS
            if is_unpickler or is_sender or OBJECTS.fullmatch(node.attr):
                yield f"{owner}.{node.attr}"
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            options = {one.arg: ast.unparse(one.value) for one in node.keywords}
            if called == "torch.load" and options.get("weights_only") != "True":
                yield called
            if options.get("allow_pickle", "False") != "False":
                yield f"{called}(allow_pickle)"
            if called.endswith(".recv") and not node.args:  # that of a socket has an argument
                yield called


def test_nothing_that_another_process_sent_is_unpickled() -> None:
    found = {module: sorted(set(unpickling(source))) for module, source in read_sources(SRC).items()}
    found = {module: names for module, names in found.items() if names}
    assert found == {module: ["pickle.loads"] for module in OWN_FILES}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("dist.all_gather_object(a, b)", ["dist.all_gather_object"]),
        ("from torch.distributed import broadcast_object_list", ["broadcast_object_list"]),
        ("torch.distributed.recv_object_list(a)", ["torch.distributed.recv_object_list"]),
        ("f = world.gather_object", ["world.gather_object"]),
        ("torch.load(path)", ["torch.load"]),
        ("torch.load(path, weights_only=False)", ["torch.load"]),
        ("pickle.loads(x)", ["pickle.loads"]),
        ("from pickle import Unpickler", ["Unpickler"]),
        ("import cloudpickle\ncloudpickle.load(file)", ["cloudpickle.load"]),
        ("np.load(path, allow_pickle=True)", ["np.load(allow_pickle)"]),
        ("from multiprocessing.connection import Client, wait", ["Client"]),
        ("a, b = multiprocessing.Pipe()", ["multiprocessing.Pipe"]),
        ("connection.recv()", ["connection.recv"]),
        # What does not unpickle.
        ("torch.load(path, weights_only=True)", []),
        ("pickle.dumps(x)", []),
        ("json.loads(x)", []),
        ("socket.recv(5)", []),
        ("parser.parse_object(x)", []),
        ("world.all_gather_tree(x)", []),
        ("np.load(path)", []),
        ("from multiprocessing.connection import wait", []),
    ],
)
def test_the_checker_finds(source: str, expected: list[str]) -> None:
    assert list(unpickling(source)) == expected
