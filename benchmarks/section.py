"""Writes what a benchmark measured as its section of results.md."""

import argparse
import re
import subprocess
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from lanewise.commands.bench.machine import describe_machine
from lanewise.commands.bench.rounds import MiddleHalf

PAGE = Path(__file__).with_name("results.md")
LIBRARIES = ("torch", "lightning", "pytorch-ignite", "accelerate", "transformers", "pyarrow", "datasets")


def publish(title: str, text: str | None, measure: Callable[[int], Iterable[str]], num_rounds: int) -> None:
    """Measure and print; with `--write` on the command line, replace its section in the results.

    What was measured before a table fails is written.

    Args:
        title: heading of the section.
        text: what was measured, and by which command: the docstring of the benchmark.
        measure: takes the number of rounds, and yields tables.
        num_rounds: how many there are unless the command line says otherwise.
    """
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("--rounds", type=int, default=num_rounds, help=f"{num_rounds} by default")
    parser.add_argument("--write", action="store_true", help=f"write the section to {PAGE.name}")
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error("one round has no spread: use --rounds 2 or more")
    today = datetime.now(tz=UTC).date()
    spreads = f"Medians with the middle half of {options.rounds} rounds."
    facts = f"{today}, commit {commit()}, {machine()}.\n{', '.join(versions())}.\n{spreads}"
    section = f"## {title}\n\n{(text or '').strip()}\n\n{facts}\n"
    print(section)
    for measured in measure(options.rounds):
        print(f"{measured}\n", flush=True)
        section += f"\n{measured}\n"
        if options.write:
            replace_section(PAGE, title, section)


def replace_section(page: Path, title: str, section: str) -> None:
    """Put a section in the place of the one with its title; a new one comes last."""
    pattern = rf"^## {re.escape(title)}\n.*?(?=^## |\Z)"
    section = f"{section.strip()}\n\n"
    written = page.read_text(encoding="utf-8")
    replaced, num_found = re.subn(pattern, lambda _: section, written, flags=re.DOTALL | re.MULTILINE)
    if not num_found:
        replaced = f"{written.rstrip()}\n\n{section}"
    page.write_text(f"{replaced.rstrip()}\n", encoding="utf-8")


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Write a table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def spread(values: Sequence[float], form: str = ".2f") -> str:
    """Write the median, and the middle half of the rounds."""
    low, median, high = MiddleHalf.of(values)
    return f"{median:{form}} ({low:{form}} to {high:{form}})"


def ratios(times: Sequence[float], base: Sequence[float]) -> list[float]:
    """Divide round by round: what slowed the machine down slowed both."""
    return [one / other for one, other in zip(times, base, strict=True)]


def commit() -> str:
    """Name the commit of what is measured, and say where it was changed; results.md itself does not count."""
    folder = PAGE.parent
    head = ["git", "rev-parse", "--short=8", "HEAD"]
    changed = ["git", "status", "--porcelain", "--untracked-files=no", "--", ":/", f":!{PAGE.name}"]
    named, changes = (
        subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()
        for command in (head, changed)
    )
    return f"{named} with changes" if changes else named


def machine() -> str:
    """Name the processor."""
    found = describe_machine()
    return f"{found['cores']} CPU cores ({found['processor']})"


def versions() -> list[str]:
    """Name the libraries that took part."""
    found = []
    for library in LIBRARIES:
        try:
            found.append(f"{library} {version(library)}")
        except PackageNotFoundError:
            continue
    return found
