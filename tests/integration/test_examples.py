"""The larger examples leave the same bytes in one process, under torchrun, and from a cell of a notebook."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.integration.command import ROOT, TORCHRUN, run, train
from tests.integration.notebook import Notebook, quiet_kernel

pytest.importorskip("pyarrow")
pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Example:
    """A task of an example, small enough for a test."""

    folder: str
    task: str
    """The task as a user makes it in a cell."""
    init_args: str
    """The same one in the configuration."""

    @property
    def config(self) -> Path:
        """Its configuration."""
        return ROOT / "examples" / self.folder / f"{self.folder}.yaml"


EXAMPLES = (
    Example(
        "contrastive",
        "from contrastive import Contrastive\ntask = Contrastive(width=32)\n",
        "{width: 32}",
    ),
    Example(
        "session_rec",
        "from session_rec import ModelConfig, SessionRec\n"
        "task = SessionRec(model=ModelConfig(num_layers=1, num_heads=2, width=16, context=5))\n",
        "{model: {num_layers: 1, num_heads: 2, width: 16, context: 5}}",
    ),
    Example(
        "question_answering",
        "from model import ReaderConfig\n"
        "from question_answering import QuestionAnswering\n"
        "task = QuestionAnswering(reader=ReaderConfig(width=16, hidden=16, dilations=(1, 2)))\n",
        "{reader: {width: 16, hidden: 16, dilations: [1, 2]}}",
    ),
)


@quiet_kernel
@pytest.mark.parametrize("example", EXAMPLES, ids=[example.folder for example in EXAMPLES])
def test_torchrun_and_a_cell_leave_what_one_process_leaves(tmp_path, monkeypatch, example):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    given = (
        f"--task.init_args={example.init_args}",
        "--batch={global_batch_size: 16, micro_batch_size: 4}",
        "--train.max_steps=3",
        "--train.epochs=null",
    )
    train(example.config, *given, f"--train.run_dir={tmp_path / 'one'}").require_success()
    on_two = (*TORCHRUN, 2, "-m", "lanewise", "train", example.config, *given)
    run(*on_two, f"--train.run_dir={tmp_path / 'torchrun'}").require_success()
    given_to_one = yaml.safe_load((tmp_path / "one" / "config.yaml").read_text())
    names = ("batch", "data", "train", "optimizer", "scheduler", "distributed")
    sections = {name: given_to_one[name] for name in names}
    sections["train"]["run_dir"] = str(tmp_path / "cell")
    sections["distributed"]["devices"] = 2
    with Notebook(
        f"import sys\nsys.path.insert(0, {str(example.config.parent)!r})\n{example.task}"
    ) as notebook:
        notebook.run(f"import lanewise\nlanewise.train(task, **{sections!r})")
    models = {
        name: (tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "torchrun", "cell")
    }
    assert models["torchrun"] == models["cell"] == models["one"]
