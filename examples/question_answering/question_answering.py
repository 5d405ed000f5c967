"""Extractive question answering in the SQuAD format, with a small reader or a pretrained one."""

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from articles import make_articles
from features import Features
from model import NEVER, Pretrained, Reader, ReaderConfig
from prepare import prepare, split
from squad import OnError, SquadScores, count_questions, list_questions, read_articles
from tokenizer import count_vocabulary, load_tokenizer
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset
from torchmetrics import Metric
from windows import Window, WindowConfig, WindowDataset, Windows, collate_windows, find_spans

from lanewise import Loss, Task
from lanewise.errors import DataError

logger = logging.getLogger(__name__)

GENERATED = Path(__file__).with_name("data")


class QuestionAnswering(Task):
    """Finds the part of a passage that answers a question.

    Args:
        folder: what `prepare.py` left; without it, articles that are generated.
        held_out: a file of questions to evaluate on, instead of the folder's held-out articles.
        pretrained: a model of `transformers`, by its name on the hub or its folder; without it, a small
            reader learns from nothing.
        reader: size of the small reader.
        windows: size of the windows.
        no_answer: whether a passage may lack the answer, as in version 2 of SQuAD.
        on_error: whether a wrong question to train on, without an answer or with one that is not where it
            should be, is an error (`raise`) or is left out (`skip`). One to evaluate on is an error.
        threshold: least score of an answer in version 2; a lower one counts as no answer.
    """

    def __init__(
        self,
        folder: Path | None = None,
        held_out: Path | None = None,
        pretrained: str | None = None,
        reader: ReaderConfig | None = None,
        windows: WindowConfig | None = None,
        no_answer: bool = False,
        on_error: OnError = "raise",
        threshold: float = 0.0,
    ) -> None:
        self.folder = folder or generated_folder(no_answer=no_answer)
        if not (self.folder / "tokenizer.json").exists():
            raise DataError(f"{self.folder} has no tokenizer.json. Make the folder with prepare.py.")
        self.held_out = held_out or self.folder / "held_out.json"
        self.pretrained = pretrained
        self.reader = reader or ReaderConfig()
        self.windows = windows or WindowConfig()
        self.no_answer = no_answer
        self.on_error = on_error
        self.threshold = threshold
        self.asked = list_questions(read_articles(self.held_out), no_answer=no_answer)

    def build_model(self) -> nn.Module:
        if self.pretrained is not None:
            return Pretrained(self.pretrained)
        return Reader(self.reader, count_vocabulary(self.folder), Features.width)

    def train_dataset(self) -> WindowDataset:
        return self.make_windows(self.folder / "train.json", by_length=False, on_error=self.on_error)

    def eval_datasets(self) -> dict[str, Dataset[Window]]:
        return {"held_out": self.make_windows(self.held_out, by_length=True)}

    def make_windows(self, path: Path, *, by_length: bool, on_error: OnError = "raise") -> WindowDataset:
        """Return the windows of a file's questions."""
        features = None
        if self.pretrained is None:
            features = Features(**json.loads((self.folder / "words.json").read_text(encoding="utf-8")))
        tokenizer = load_tokenizer(self.pretrained, self.folder)
        articles = read_articles(path, on_error)
        questions = list_questions(articles, no_answer=self.no_answer, on_error=on_error)
        if num_left_out := count_questions(articles) - len(questions):
            logger.warning("left out: %d questions of %s, whose answers are wrong", num_left_out, path)
        return WindowDataset(questions, tokenizer, features, self.windows, by_length=by_length)

    def sample_lengths(self, dataset: Dataset[Any]) -> Sequence[int]:
        assert isinstance(dataset, WindowDataset)
        return dataset.lengths()

    def collate(self, samples: Sequence[Window]) -> Windows:
        return collate_windows(samples)

    def forward(self, model: nn.Module, batch: Windows) -> torch.Tensor:
        logits: torch.Tensor = model(batch)
        is_possible = batch.ends > batch.starts
        is_possible[:, 0] = True  # [CLS]: no answer
        return logits.masked_fill(~is_possible[:, :, None], NEVER)

    def loss(self, outputs: torch.Tensor, batch: Windows) -> Loss:
        sums = [F.cross_entropy(outputs[:, :, end], batch.answers[:, end], reduction="sum") for end in (0, 1)]
        return Loss(sums[0] + sums[1], weight=2 * len(batch.questions))

    def build_metrics(self) -> dict[str, Metric]:
        return {"squad": SquadScores(self.asked, no_answer=self.no_answer, threshold=self.threshold)}

    def update_metrics(self, metrics: Mapping[str, Metric], outputs: torch.Tensor, batch: Windows) -> None:
        metrics["squad"].update(*find_spans(outputs, batch, self.windows.max_answer_tokens))


def generated_folder(*, no_answer: bool) -> Path:
    """Return the folder of the generated articles, which is made when it is first asked for."""
    articles = make_articles(no_answer=no_answer)
    digest = hashlib.sha256(json.dumps(articles).encode()).hexdigest()
    folder = GENERATED / f"generated-{digest[:8]}"
    if not folder.exists():
        prepare(*split(articles), folder, vocabulary_size=600)
    return folder
