"""Prints what answers without learning score: `python baselines.py FILE`, such as FOLDER/held_out.json."""

import argparse
import random
import re
from collections.abc import Callable
from pathlib import Path

from features import find_stem
from squad import Question, list_questions, read_articles, score_answers


def draw_words(question: Question) -> str:
    """Return up to four words from anywhere."""
    words = question.context.split()
    draw = random.Random(question.id)
    start = draw.randrange(len(words))
    return " ".join(words[start : start + draw.randint(1, 4)])


def find_name(question: Question) -> str:
    """Return the first words with capitals, or the first number, that the question does not have."""
    for match in re.finditer(r"[A-Z]\w+(?: [A-Z]\w+)*|\d[\d,.]*", question.context):
        if match.group().lower() not in question.text.lower():
            return match.group()
    return ""


def find_sentence(question: Question) -> str:
    """Return the sentence that has the most words of the question."""
    asked = {find_stem(word) for word in re.findall(r"\w+", question.text.lower())}
    sentences = re.split(r"(?<=[.!?]) ", question.context)
    return max(
        sentences,
        key=lambda text: len({find_stem(word) for word in re.findall(r"\w+", text.lower())} & asked),
    )


def find_nothing(question: Question) -> str:  # noqa: ARG001 - as the others
    return ""


BASELINES: dict[str, Callable[[Question], str]] = {
    "random words": draw_words,
    "first name or number": find_name,
    "sentence like the question": find_sentence,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--no-answer", action="store_true", help="the file is of version 2")
    given = parser.parse_args()
    questions = list_questions(read_articles(given.file), no_answer=given.no_answer)
    baselines = dict(BASELINES)
    if given.no_answer:
        baselines["no answer"] = find_nothing
    for name, answer in baselines.items():
        answers = {question.id: answer(question) for question in questions}
        values = score_answers(questions, answers, no_answer=given.no_answer)
        print(f"{name:28}" + "  ".join(f"{key} {value:.1f}" for key, value in values.items()))


if __name__ == "__main__":
    main()
