"""Runs one of the parts into which what is slow is cut, so that all of it can be run in turns.

    make test-part                # the part that HEAD chooses
    make test-part PART=2/5       # a part by name

A part is some of the files that have slow tests, and some of the other targets of the Makefile that test. No
file is cut. slow_seconds.json has what each takes on an idle machine; from it follows how many parts there
are, of half an hour at most on two cores.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from itertools import count

from tests.timing import SLOW, TESTS

ROOT = TESTS.parent
MOST_SECONDS = 1500.0
"""Half an hour, without what it takes to start."""
_NUM_WORKERS = 2
_OF_A_NEW_FILE = 30.0
_MARKED = re.compile(r"mark\.slow\b|\bslow\(")
_OF_TEST_DEVICE = ("distributed/fake_device", "gpu")


def slow_files() -> Iterator[str]:
    """Yield the files that have slow tests, but for those that test-device runs."""
    for path in sorted(TESTS.rglob("test_*.py")):
        name = path.relative_to(TESTS).as_posix()
        if not name.startswith(_OF_TEST_DEVICE) and _MARKED.search(path.read_text(encoding="utf-8")):
            yield name


def units() -> dict[str, float]:
    """Return the files and targets that are never cut, and how many seconds a part takes longer by each."""
    known = json.loads(SLOW.read_text(encoding="utf-8"))
    files = {name: known["files"].get(name, _OF_A_NEW_FILE) / _NUM_WORKERS for name in slow_files()}
    return files | known["targets"]


def cut(seconds: Mapping[str, float], num_parts: int) -> list[list[str]]:
    """Return parts that take about equally long: the longest unit first, each to the part with least."""
    parts: list[list[str]] = [[] for _ in range(num_parts)]
    loads = [0.0] * num_parts
    for name in sorted(seconds, key=lambda name: (-seconds[name], name)):
        least = loads.index(min(loads))
        parts[least].append(name)
        loads[least] += seconds[name]
    return parts


def fewest(seconds: Mapping[str, float]) -> int:
    """Return the least number of parts of which none is too long, or longer than the longest unit."""
    most = max(MOST_SECONDS, *seconds.values())
    sums = ((num, (sum(map(seconds.get, part)) for part in cut(seconds, num))) for num in count(1))
    return next(num for num, loads in sums if max(loads) <= most)


def chosen(text: str, num_parts: int) -> tuple[int, int]:
    """Return the number of a part, from 1, and of how many: as is said, or by the hash of HEAD."""
    if text:
        if not (match := re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", text)) or int(match[1]) > int(match[2]):
            sys.exit(f"PART is {text!r}. It is a part of several, such as 1/{num_parts}.")
        return int(match[1]), int(match[2])
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    return int(head.stdout, 16) % num_parts + 1, num_parts


def why_not(target: str) -> str | None:
    """Say why this machine cannot run a target; None if it can."""
    if target == "failures" and os.geteuid() != 0:
        return "it needs root, to make hosts of its own"
    return None


def main() -> None:
    """Run a part to its end, and exit with 1 if anything of it failed."""
    seconds = units()
    number, num_parts = chosen(sys.argv[1] if len(sys.argv) > 1 else "", fewest(seconds))
    part = cut(seconds, num_parts)[number - 1]
    files = [name for name in part if name.endswith(".py")]
    minutes = sum(map(seconds.get, part)) / 60
    print(f"part {number}/{num_parts}, about {minutes:.0f} minutes on two idle cores:", *part, flush=True)
    commands = [["make", target] for target in part if target not in files]
    if files:
        marked = [
            "-m",
            "slow and not gpu",
            "-n",
            str(_NUM_WORKERS),
            "--dist",
            "loadfile",
            "--no-loadscope-reorder",
        ]
        commands.append(
            [sys.executable, "-m", "pytest", *marked, *(f"{TESTS.name}/{name}" for name in files)]
        )
    failed = []
    for command in commands:
        if reason := why_not(command[-1]):
            print(f"not run: {command[-1]}, as {reason}", flush=True)
        elif subprocess.run(command, cwd=ROOT, check=False).returncode:
            failed.append(" ".join(command[:4]))
    sys.exit(f"failed in part {number}/{num_parts}: {'; '.join(failed)}" if failed else None)


if __name__ == "__main__":
    main()
