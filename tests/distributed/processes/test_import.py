"""A task's module that seeds the generators when it is imported, as plain scripts do."""

import sys

from lanewise.testing import run_distributed
from tests.distributed.tasks import configure, train


def train_seeded(world, folder, is_imported_before):
    sys.path.insert(0, folder)
    if is_imported_before:
        import seeded_script  # noqa: F401
    return train(world, configure("seeded_script.Seeded", steps=2))


def test_it_changes_nothing_whether_it_was_imported_before_or_not(tmp_path):
    """The parent of a run on one process had imported it to check it, workers had not: other weights."""
    script = "import torch\nfrom tests.distributed import tasks\n"
    script += "torch.manual_seed(5)\nclass Seeded(tasks.Language): ...\n"
    (tmp_path / "seeded_script.py").write_text(script)
    early, late = (run_distributed(train_seeded, 1, str(tmp_path), before)[0] for before in (True, False))
    assert early == late
