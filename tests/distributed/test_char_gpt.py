"""The character GPT of the examples, in `exact`."""

import sys
from pathlib import Path

import pytest

from lanewise.testing import run_distributed
from tests.distributed.tasks import configure, train

EXAMPLE = Path(__file__).parents[2] / "examples" / "char_gpt"


def train_example(world, config):
    sys.path.insert(0, str(EXAMPLE))
    return train(world, config)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    text = tmp_path_factory.mktemp("text") / "text.txt"
    text.write_text("What is the same on one device and on many? " * 30, encoding="utf-8")
    # 74 windows of 16 characters in steps of 32: the third of an epoch has 10 windows on 3 of 8 lanes.
    model = {"num_layers": 2, "num_heads": 2, "width": 16, "context": 16, "dropout": 0.2}
    return configure("char_gpt.CharGPT", micro_batch_size=4, steps=4, path=str(text), model=model)


def test_one_to_four_processes_give_the_same_bytes(config):
    alone = run_distributed(train_example, 1, config)[0]
    for world_size in (2, 3, 4):
        for result in run_distributed(train_example, world_size, config):
            assert result == alone
