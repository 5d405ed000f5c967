"""What a world leaves behind in a process.

Threads of gloo that outlive python's interpreter abort the process (SIGABRT after a good run, about 1 in 15).
They outlived it because DDP held its communication hook, and the hook held DDP.
"""

from pathlib import Path

import pytest

from lanewise.testing import run_distributed
from tests.distributed.tasks import Language, configure, train


def native_threads() -> list[str]:
    return [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]


def train_and_leave(world, equality):
    before = native_threads()
    train(world, configure(Language, steps=3, equality=equality))
    world.close()
    world.close = lambda: None
    return [name for name in before if "gloo" in name], [name for name in native_threads() if "gloo" in name]


@pytest.mark.parametrize("equality", ["close", "exact"])
def test_closing_it_ends_the_threads_of_gloo(equality):
    for before, after in run_distributed(train_and_leave, 2, equality):
        assert before
        assert after == []
