"""Questions in the SQuAD format: how they are read, and how answers to them are scored."""

import json
import re
import string
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from lanewise.errors import DataError

Article = Mapping[str, Any]
"""A title, and paragraphs of which each has a context and questions, as the files have them."""

OnError = Literal["raise", "skip"]
"""What becomes of a question without an answer, or whose answer is not where it should be."""

_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True)
class Question:
    """A question, the passage that may answer it, and the answers that people gave."""

    id: str
    text: str
    context: str
    answers: tuple[tuple[int, str], ...]
    """Where each begins in the context, in characters, and the answer; none: the passage has no answer."""


@dataclass(frozen=True)
class Found:
    """The best answer in one window of a passage."""

    question: int
    """Number of the question."""
    start: int
    end: int
    """Where it begins and ends in the context, in characters."""
    score: float
    """How much likelier it is than that the window has no answer."""


class SquadScores(Metric):
    """Exact match and F1 in percent, over questions of which each may have come in several windows.

    The windows of a question may lie in several lanes, so a lane only notes what it found in its windows.
    What belongs to one question is joined in `compute`, which has the notes of all lanes.

    Args:
        questions: those whose numbers `update` gets.
        no_answer: score as the script of version 2 does, with questions that have no answer.
        threshold: in version 2, an answer of a lower score counts as no answer.
    """

    full_state_update = False
    places: list[torch.Tensor] | torch.Tensor
    scores: list[torch.Tensor] | torch.Tensor

    def __init__(self, questions: Sequence[Question], *, no_answer: bool, threshold: float = 0.0) -> None:
        super().__init__()
        self.questions = questions
        self.no_answer = no_answer
        self.threshold = threshold
        self.add_state("places", [], dist_reduce_fx="cat")
        self.add_state("scores", [], dist_reduce_fx="cat")

    def update(self, places: torch.Tensor, scores: torch.Tensor) -> None:
        """Note the best answer of each window.

        Args:
            places: int64 [windows, 3], with the question, the start and the end of `Found`.
            scores: [windows].
        """
        assert isinstance(self.places, list)
        assert isinstance(self.scores, list)
        self.places.append(places)
        self.scores.append(scores)

    def compute(self) -> dict[str, float]:
        """Score the questions of which a window came."""
        places, scores = dim_zero_cat(self.places).tolist(), dim_zero_cat(self.scores).tolist()
        found = [
            Found(question, start, end, score)
            for (question, start, end), score in zip(places, scores, strict=True)
        ]
        answers = join(self.questions, found, self.threshold if self.no_answer else None)
        asked = [question for question in self.questions if question.id in answers]
        return score_answers(asked, answers, no_answer=self.no_answer)


def join(
    questions: Sequence[Question], found: Iterable[Found], threshold: float | None = None
) -> dict[str, str]:
    """Return the best answer over all windows of each question, by the question's id.

    Args:
        questions: those whose numbers `found` has.
        found: the best answer of each window, in any order.
        threshold: an answer of a lower score becomes the empty text; None: each question has an answer.
    """
    best: dict[int, Found] = {}
    for one in found:
        other = best.get(one.question)
        if other is None or (one.score, -one.start, -one.end) > (other.score, -other.start, -other.end):
            best[one.question] = one
    return {
        questions[number].id: ""
        if threshold is not None and one.score < threshold
        else questions[number].context[one.start : one.end]
        for number, one in sorted(best.items())
    }


def score_answers(
    questions: Sequence[Question], answers: Mapping[str, str], *, no_answer: bool
) -> dict[str, float]:
    """Score answers by the id of their question, as the official scripts do; a missing answer is wrong."""
    exact = [0.0] * len(questions)
    overlap = [0.0] * len(questions)
    for number, question in enumerate(questions):
        if (given := answers.get(question.id)) is None:
            continue
        right = [answer for _, answer in question.answers]
        if no_answer:
            right = [answer for answer in right if normalize(answer)] or [""]
        exact[number] = max(float(normalize(given) == normalize(answer)) for answer in right)
        overlap[number] = max(f1(given, answer, no_answer=no_answer) for answer in right)
    values = {"exact_match": _percent(exact), "f1": _percent(overlap)}
    if no_answer:
        has_answer = [bool(question.answers) for question in questions]
        for name, wanted in (("has_answer", True), ("no_answer", False)):
            part = [value for value, has in zip(overlap, has_answer, strict=True) if has is wanted]
            values |= {f"{name}_f1": _percent(part)} if part else {}
    return values


def normalize(answer: str) -> str:
    """Lower the case, and leave out punctuation, articles and surplus blanks, in this order."""
    letters = answer.lower().translate(_PUNCTUATION)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", letters).split())


def f1(given: str, right: str, *, no_answer: bool) -> float:
    """Return the F1 of the words of two answers; in version 2 two answers without words are the same."""
    words, right_words = normalize(given).split(), normalize(right).split()
    if no_answer and not (words and right_words):
        return float(words == right_words)
    num_same = (Counter(words) & Counter(right_words)).total()
    if num_same == 0:
        return 0.0
    precision, recall = num_same / len(words), num_same / len(right_words)
    return 2 * precision * recall / (precision + recall)


def _percent(values: Sequence[float]) -> float:
    return 100 * sum(values) / len(values)


def read_articles(path: Path, on_error: OnError = "raise") -> list[Article]:
    """Read a file in the SQuAD format, with the questions that `list_questions` may leave out.

    Raises:
        DataError: if it is none; see `list_questions` too.
    """
    try:
        articles = json.loads(path.read_text(encoding="utf-8"))["data"]
        list_questions(articles, no_answer=True, on_error=on_error)
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror}. Name a file in the SQuAD format."
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} is no file in the SQuAD format ({type(error).__name__}: {error}). It should have data, "
            "a list of articles with paragraphs, each with a context and qas."
        ) from None
    return list(articles)


def list_questions(
    articles: Iterable[Article], *, no_answer: bool, on_error: OnError = "raise"
) -> list[Question]:
    """Return the questions of articles.

    Args:
        articles: as a file has them.
        no_answer: whether a question may have none.
        on_error: whether a question that has no answer and may not, or has one that is not where it should
            be, is an error (`raise`) or is left out (`skip`).

    Raises:
        DataError: if there is such a question, and `on_error` is not `skip`.
    """
    questions = []
    for article in articles:
        for paragraph in article["paragraphs"]:
            context = paragraph["context"]
            for asked in paragraph["qas"]:
                answers = tuple((answer["answer_start"], answer["text"]) for answer in asked["answers"])
                question = Question(asked["id"], asked["question"], context, answers)
                try:
                    _check(question, no_answer)
                except DataError:
                    if on_error == "raise":
                        raise
                    continue
                questions.append(question)
    return questions


def count_questions(articles: Iterable[Article]) -> int:
    """Return how many questions there are, with those that are left out."""
    return sum(len(paragraph["qas"]) for article in articles for paragraph in article["paragraphs"])


def _check(question: Question, no_answer: bool) -> None:
    if not question.answers and not no_answer:
        raise DataError(
            f"question {question.id} has no answer, as in version 2 of SQuAD. "
            "Set task.init_args.no_answer: true, or leave such questions out with on_error: skip."
        )
    for start, answer in question.answers:
        if (there := question.context[start : start + len(answer)]) != answer:
            raise DataError(
                f"question {question.id} has the answer {answer!r} at {start}, and the passage has {there!r} "
                "there. Count the characters of the text, not its bytes, or leave such questions out with "
                "on_error: skip."
            )
