"""The README's example runs as it stands there, and its links lead somewhere."""

import re
from pathlib import Path

from tests.integration.command import lanewise

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def block(language: str) -> str:
    """Return the only block of a language."""
    (found,) = re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)
    return found


def test_the_example_trains_the_same_bytes_on_two_processes_and_on_one(tmp_path):
    (tmp_path / "digits.py").write_text(block("python"))
    (tmp_path / "digits.yaml").write_text(block("yaml"))
    short = ("--train.max_steps", 2)
    lanewise("train", "digits.yaml", *short, cwd=tmp_path).require_success()
    one = ("--distributed.devices", 1, "--train.run_dir", "runs/one")
    lanewise("train", "digits.yaml", *short, *one, cwd=tmp_path).require_success()
    models = [(tmp_path / "runs" / name / "model.safetensors").read_bytes() for name in ("digits", "one")]
    assert models[0] == models[1]


def test_links_lead_to_files_and_headings():
    for target in re.findall(r"\]\(([^)]+)\)", README):
        if target.startswith("https://"):
            continue
        path, _, heading = target.partition("#")
        assert (ROOT / path).exists(), target
        headings = re.findall(r"^#+ (.*)$", (ROOT / path).read_text(), flags=re.MULTILINE) if heading else []
        names = [re.sub(r"[^a-z0-9 -]", "", one.lower()).replace(" ", "-") for one in headings]
        assert not heading or heading in names, target
