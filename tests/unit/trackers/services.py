"""Stand-ins for the packages of services, of which tests/integration/test_trackers.py has the real ones."""

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from lanewise.runs.callback import RunStart
from lanewise.trackers.tracker import End, Line, Tracker
from tests.distributed.tasks import configure


def stand_in(monkeypatch, name: str, **members: Any) -> None:
    """Let an import of a package find these members."""
    module = ModuleType(name)
    vars(module).update(members, __spec__=ModuleSpec(name, None))
    monkeypatch.setitem(sys.modules, name, module)


def start(tracker: Tracker, run_dir: Path) -> int:
    """Begin, and return the line after which the service wants more."""
    return tracker.open(RunStart(run_dir, "0123456789abcdef", configure("unused.Task"), 1, 9))


def send(tracker: Tracker, *numbers: int) -> None:
    for number in numbers:
        tracker.send(Line(number, 1, 10 * number, 100.0 + number, {"train/loss": 0.5}))


def end(tracker: Tracker) -> None:
    tracker.close(End("finished", "ab" * 32))
