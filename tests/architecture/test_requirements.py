"""No test is skipped for want of a package, as `make test` installs it."""

import re
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

from tests.timing import how_to_run

ROOT = Path(__file__).parents[2]
SKIP = re.compile(r'(?:importorskip|skipif\(find_spec)\("(\w+)')


def plain(name):
    """The name of a distribution, as all spellings of it have it in common."""
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", name)[0]).lower()


def test_whatever_tests_skip_without_is_a_requirement_of_development():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    required = {plain(requirement) for extra in extras.values() for requirement in extra}
    (own,) = [requirement for requirement in extras["dev"] if plain(requirement) == "lanewise"]
    assert set(extras) == {"dev", *re.findall(r"\w+", own.partition("[")[2])}
    files = [path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__)]
    skipped = {module for path in files for module in SKIP.findall(path.read_text())}
    of_module = packages_distributions()
    lacking = [one for one in skipped if not required & {plain(name) for name in of_module.get(one, [])}]
    assert len(skipped) >= 4
    assert lacking == []


def test_what_is_missing_is_installed_by_the_commands_that_are_printed():
    """The names of two packages had a comma between them, and pip was named where nothing was pip's."""
    reasons = [
        "not installed: sinfo, munged (Debian: slurm-wlm, munge)",
        "not installed: munged (Debian: munge)",
        "apex.amp is not installed: apex_theirs.py was only parsed",
        "needs two devices",
    ]
    assert list(how_to_run(reasons)) == ["apt-get install munge slurm-wlm"]
    of_pip = ["could not import 'playwright.sync_api': No module named 'playwright'", "not installed: axe"]
    for reason in of_pip:
        assert list(how_to_run([reason])) == [".venv/bin/pip install -c constraints.txt -e '.[dev]'"]
