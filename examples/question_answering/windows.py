"""Questions with windows of their passages, as samples of like kind whatever the length of the passage."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from features import Features
from squad import Question
from tokenizers import Encoding, Tokenizer
from torch import nn
from torch.utils.data import Dataset

from lanewise.data import pad
from lanewise.errors import DataError

Numbers = npt.NDArray[np.int32]
Places = npt.NDArray[np.int64]


@dataclass(frozen=True)
class WindowConfig:
    """Size of the windows, in tokens."""

    max_tokens: int = 384
    """Of a window at most, with the question and the special tokens."""
    overlap: int = 128
    """That neighbours share; a longer answer may be whole in none of them."""
    max_answer_tokens: int = 24
    """Of an answer that is found."""


class Window(NamedTuple):
    """A question and a window of its passage, as the tokens [CLS] question [SEP] window [SEP]."""

    question: int
    """Number of the question."""
    tokens: torch.Tensor
    """int64 [length]."""
    types: torch.Tensor
    """int64 [length]: 0 for the question, 1 for the passage."""
    starts: torch.Tensor
    ends: torch.Tensor
    """int64 [length]: where each token of the passage is in the context, in characters; elsewhere 0."""
    features: torch.Tensor
    """float32 [length, features]; of the passage's tokens, elsewhere 0."""
    answer: torch.Tensor
    """int64 [2]: the answer's first and last token; 0 and 0 if the window has none."""


class Windows(NamedTuple):
    """A micro-batch of windows, filled up to the longest."""

    questions: torch.Tensor
    tokens: torch.Tensor
    types: torch.Tensor
    mask: torch.Tensor
    """Where the windows' own tokens are: bool [windows, longest]."""
    starts: torch.Tensor
    ends: torch.Tensor
    features: torch.Tensor
    answers: torch.Tensor


class WindowDataset(Dataset[Window]):
    """The windows of questions; neighbours of one passage overlap, so that an answer is whole in one of them.

    Args:
        questions: with their passages.
        tokenizer: knows where in the text a token is.
        features: describes the words of a passage; None for a model that takes none.
        config: size of the windows.
        by_length: whether the windows come by length, so that an evaluation in order pads little.

    Raises:
        DataError: if a question leaves no room for a window.
    """

    def __init__(
        self,
        questions: Sequence[Question],
        tokenizer: Tokenizer,
        features: Features | None,
        config: WindowConfig,
        *,
        by_length: bool,
    ) -> None:
        self.questions = questions
        self.features = features
        contexts = dict.fromkeys(question.context for question in questions)
        self._passages = {context: features.read(context) for context in contexts} if features else {}
        tokenizer.no_padding()
        tokenizer.no_truncation()
        for question in questions:
            _check_room(tokenizer, question, config)
        tokenizer.enable_truncation(config.max_tokens, stride=config.overlap, strategy="only_second")
        self._rows: list[tuple[int, Numbers, Numbers]] = []
        for number, question in enumerate(questions):
            first = tokenizer.encode(question.text, question.context)
            self._rows += [(number, *_to_arrays(encoding)) for encoding in (first, *first.overflowing)]
        if by_length:
            self._rows.sort(key=lambda row: len(row[1]))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Window:
        number, tokens, places = self._rows[index]
        question = self.questions[number]
        types, starts, ends = places.astype(np.int64)
        features = np.zeros((len(tokens), self.features.width if self.features else 0), np.float32)
        is_passage = ends > starts
        if self.features is not None and is_passage.any():
            passage = self._passages[question.context]
            features[is_passage] = self.features.describe(question.text, passage, starts[is_passage])
        return Window(
            number,
            torch.from_numpy(tokens).long(),
            torch.from_numpy(types),
            torch.from_numpy(starts),
            torch.from_numpy(ends),
            torch.from_numpy(features),
            torch.tensor(find_answer(question, starts, ends)),
        )

    def lengths(self) -> list[int]:
        """Return the tokens of each window."""
        return [len(tokens) for _, tokens, _ in self._rows]


def _check_room(tokenizer: Tokenizer, question: Question, config: WindowConfig) -> None:
    num_tokens = len(tokenizer.encode(question.text, add_special_tokens=False))
    room = config.max_tokens - num_tokens - tokenizer.num_special_tokens_to_add(is_pair=True)
    if room <= config.overlap:
        raise DataError(
            f"question {question.id} has {num_tokens} tokens, which leaves {room} of {config.max_tokens} for "
            f"a window of its passage, and neighbours share {config.overlap}. Raise windows.max_tokens, or "
            "lower windows.overlap."
        )


def _to_arrays(encoding: Encoding) -> tuple[Numbers, Numbers]:
    """Return the tokens, and of each its type, start and end [3, length]."""
    is_passage = np.array([sequence == 1 for sequence in encoding.sequence_ids])
    places = np.column_stack([encoding.type_ids, np.where(is_passage[:, None], encoding.offsets, 0)])
    return np.array(encoding.ids, np.int32), np.ascontiguousarray(places.T, dtype=np.int32)


def find_answer(question: Question, starts: Places, ends: Places) -> tuple[int, int]:
    """Return the first and the last token of the question's first answer; 0 and 0 if it is not whole here.

    Args:
        question: the question.
        starts: where each token of the window begins in the context, in characters.
        ends: where it ends; a token that is not the passage's has no characters.
    """
    if not question.answers:
        return 0, 0
    start, answer = question.answers[0]
    answer_start = start + len(answer) - len(answer.lstrip())
    answer_end = start + len(answer.rstrip())
    inside = np.flatnonzero((ends > answer_start) & (starts < answer_end) & (ends > starts))
    if not len(inside) or starts[inside[0]] > answer_start or ends[inside[-1]] < answer_end:
        return 0, 0
    return int(inside[0]), int(inside[-1])


def collate_windows(windows: Sequence[Window]) -> Windows:
    """Fill windows up to the longest."""
    tokens = pad([window.tokens for window in windows])
    return Windows(
        torch.tensor([window.question for window in windows]),
        tokens.values,
        pad([window.types for window in windows]).values,
        tokens.mask,
        pad([window.starts for window in windows]).values,
        pad([window.ends for window in windows]).values,
        nn.utils.rnn.pad_sequence([window.features for window in windows], batch_first=True),
        torch.stack([window.answer for window in windows]),
    )


def find_spans(
    logits: torch.Tensor, windows: Windows, max_answer_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the best answer of each window, as `SquadScores.update` takes them.

    Args:
        logits: of an answer's first and last token, [windows, tokens, 2]; those of the first token, [CLS],
            say that the window has no answer.
        windows: with as many tokens.
        max_answer_tokens: of an answer at most.
    """
    num_tokens = logits.shape[1]
    pairs = logits[:, :, None, 0] + logits[:, None, :, 1]  # [windows, first token, last token]
    is_span = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=logits.device)
    is_span = is_span.triu().tril(max_answer_tokens - 1)
    is_span[0] = False
    best, place = pairs.masked_fill(~is_span, -torch.inf).flatten(1).max(1)
    rows = torch.arange(len(place), device=logits.device)
    first, last = place // num_tokens, place % num_tokens
    places = torch.stack([windows.questions, windows.starts[rows, first], windows.ends[rows, last]], 1)
    return places, best - pairs[:, 0, 0]
