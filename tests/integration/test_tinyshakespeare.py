"""The character GPT of the examples learns a real text."""

import json
import os
import re
import sys
from pathlib import Path

import pytest

from tests.integration.command import ROOT, run, train

TEXT = Path(os.environ.get("LANEWISE_DATA", "/nonexistent")) / "tinyshakespeare" / "input.txt"
EXAMPLE = ROOT / "examples" / "char_gpt"
NUM_STEPS = 750
"""The learning rate falls to its end over them."""
PROMPT_SIZE = 64
"""Held-out characters that each sample begins with."""


def share_of_known_words(text: str, known_text: str) -> float:
    words, known_words = (re.findall(r"[a-z]+", part.lower()) for part in (text, known_text))
    known = set(known_words)
    return sum(word in known for word in words) / len(words)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not TEXT.exists(), reason="the text is not in $LANEWISE_DATA/tinyshakespeare")
def test_it_predicts_held_out_characters_and_writes_words_of_the_text(tmp_path):
    overrides = (
        f"--task.init_args.path={TEXT}",
        f"--train.run_dir={tmp_path}",
        f"--train.max_steps={NUM_STEPS}",
        "--batch.micro_batch_size=16",  # one lane for each of the two processes
        "--distributed.devices=2",
    )
    train(EXAMPLE / "char_gpt.yaml", *overrides, patience_seconds=540).require_success()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["held_out/loss"] < 1.9  # nats a character

    sample = run(sys.executable, EXAMPLE / "sample.py", tmp_path).require_success().stdout
    text = TEXT.read_text(encoding="utf-8")
    train_text = text[: len(text) * 9 // 10]
    before, after = (
        share_of_known_words(part[PROMPT_SIZE:], train_text) for part in sample.split(" training\n")[1:]
    )
    assert before < 0.2
    assert after > 0.5
