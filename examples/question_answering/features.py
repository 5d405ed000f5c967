"""What can be said of a passage's words beside a question, without having learned what words mean."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_WORD = re.compile(r"[^\W\d_]+|\d+|[^\w\s]|_")
_LONG_ENDINGS = ("ations", "ation", "ments", "ment", "ings", "ing", "ies", "ers")
_ENDINGS = (*_LONG_ENDINGS, "ed", "er", "es", "ly", "s", "e", "y")
_KINDS = ("who", "when", "where", "what", "which", "why", "how many", "how much", "how", "year", "name")
_REACHES = (3, 8, 20)
"""How many words before and after a word are looked at for words of the question."""
_FORMS = 6

Array = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Passage:
    """The words of a passage, and what can be said of them without a question."""

    starts: npt.NDArray[np.int64]
    """Where each begins, in characters."""
    words: npt.NDArray[np.str_]
    stems: npt.NDArray[np.str_]
    rarity: Array
    forms: Array
    """[words, 6]: capital, capitals only, number, year, punctuation, rarity."""


class Features:
    """Describes each word of a passage: how much of the question is there and around it, and its form.

    Args:
        num_texts: how many texts were counted.
        counts: in how many of them each stem occurs. A rare one tells more.
    """

    width = _FORMS + 3 + 2 * len(_REACHES) + len(_KINDS)
    """How many numbers describe a word."""

    def __init__(self, num_texts: int, counts: Mapping[str, int]) -> None:
        self.num_texts = num_texts
        self.counts = counts

    def rarity(self, stems: Iterable[str]) -> Array:
        """Return numbers from 0, for a stem in every text, to 1, for one in none."""
        most = math.log(self.num_texts + 1)
        return np.array([1 - math.log(self.counts.get(stem, 0) + 1) / most for stem in stems], np.float32)

    def read(self, context: str) -> Passage:
        """Find the words of a passage."""
        matches = list(_WORD.finditer(context))
        words = [match.group() for match in matches]
        stems = [find_stem(word.lower()) for word in words]
        rarity = self.rarity(stems)
        forms = [
            (
                word[0].isupper(),
                word.isupper() and len(word) > 1,
                word[0].isdigit(),
                word.isdigit() and len(word) == 4,
                not word[0].isalnum(),
            )
            for word in words
        ]
        return Passage(
            np.array([match.start() for match in matches]),
            np.array([word.lower() for word in words]),
            np.array(stems),
            rarity,
            np.column_stack([np.array(forms, np.float32), rarity]),
        )

    def describe(self, question: str, passage: Passage, starts: npt.NDArray[np.int64]) -> Array:
        """Describe the words in which tokens are: [tokens, width].

        Args:
            question: the question.
            passage: the words of the whole passage.
            starts: where each token begins in it, in characters.
        """
        asked = [word for word in _WORD.findall(question.lower()) if word[0].isalnum()]
        stems = sorted({find_stem(word) for word in asked})
        is_asked = np.isin(passage.stems, stems)
        found = passage.rarity * is_asked
        total = float(self.rarity(stems).sum()) + 1e-3
        around = [_sum_around(found, reach) / total for reach in _REACHES]
        relative = [values / values.max(initial=1e-3) for values in around]
        columns = [np.isin(passage.words, asked), is_asked, found, *around, *relative]
        kinds = np.tile(np.array([kind in question.lower() for kind in _KINDS]), (len(found), 1))
        words = np.column_stack([passage.forms, *columns, kinds]).astype(np.float32)
        word_of_token = np.searchsorted(passage.starts, starts, side="right") - 1
        return words[np.maximum(word_of_token, 0)]


def count_stems(texts: Iterable[str]) -> Counter[str]:
    """Count in how many texts each stem occurs."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update({find_stem(word) for word in _WORD.findall(text.lower())})
    return counts


def find_stem(word: str) -> str:
    """Cut the ending off a word in lower case, roughly."""
    for ending in _ENDINGS:
        if word.endswith(ending) and len(word) - len(ending) >= 3:
            return word[: -len(ending)]
    return word


def _sum_around(values: Array, reach: int) -> Array:
    """Sum the values around each place, the nearer ones with more weight."""
    weights = 1 - np.abs(np.arange(-reach, reach + 1)) / (reach + 1)
    return np.convolve(values, weights, "full")[reach : reach + len(values)].astype(np.float32)
