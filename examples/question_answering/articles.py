"""Generated articles with questions, so that the example trains without any data; no town in them exists."""

import random
from typing import Any

_BEGINNINGS = ("Vel", "Tor", "Ask", "Mar", "Lun", "Bre", "Kal", "Fen", "Os", "Dra", "Hol", "Sel")
_ENDS = ("mora", "dal", "vik", "stead", "burg", "minster", "ford", "haven", "ona", "field")
_FIRST_NAMES = ("Anna", "Tomas", "Greta", "Ivo", "Clara", "Emil", "Nora", "Oskar", "Paula", "Henrik")
_LAST_NAMES = ("Tresk", "Holm", "Varga", "Linde", "Moreau", "Okafor", "Brandt", "Silva", "Novak", "Byrne")
_STONES = ("granite", "red brick", "limestone", "white marble", "sandstone", "slate")
_GOODS = ("glass", "salted fish", "paper", "wool", "church bells", "clocks", "honey", "copper wire")
_WATERS = ("Orrin", "Teal", "Ferrow", "Lisk", "Marrow", "Upper Dane")

# What is said of a town, what is asked about it, and the part of the sentence that answers.
_FACTS = (
    ("{town} was founded in {year} by {person}.", "Who founded {town}?", "{person}"),
    ("The town of {town} was first mentioned in {year}.", "When was {town} first mentioned?", "{year}"),
    ("Its bridge over the {water} is built of {stone}.", "What is the bridge of {town} built of?", "{stone}"),
    ("{town} lies on the river {water}.", "On which river does {town} lie?", "{water}"),
    ("In {year}, about {number} people lived in {town}.", "How many people lived in {town}?", "{number}"),
    ("The workshops of {town} are known for their {goods}.", "What is {town} known for?", "{goods}"),
    ("The school was opened by {person} in {year}.", "When was the school of {town} opened?", "{year}"),
    ("{person} painted the ceiling of the town hall.", "Who painted the town hall of {town}?", "{person}"),
    ("A great fire destroyed the market in {year}.", "When did the market of {town} burn?", "{year}"),
    ("The tower of {number} blocks is {person}'s.", "How many blocks has the tower of {town}?", "{number}"),
)
_SENTENCES_EACH = 5


def make_articles(
    *, no_answer: bool, num_articles: int = 72, paragraphs_each: int = 4
) -> list[dict[str, Any]]:
    """Make articles in the SQuAD format, the same ones each time.

    Args:
        no_answer: whether each paragraph has a question that it does not answer, as in version 2 of SQuAD.
        num_articles: a town each.
        paragraphs_each: of so many facts each, about which there are questions.
    """
    draw = random.Random(0)
    towns = [beginning + end for beginning in _BEGINNINGS for end in _ENDS]
    return [
        {
            "title": town,
            "paragraphs": [
                _make_paragraph(draw, town, f"{town}-{number}", no_answer)
                for number in range(paragraphs_each)
            ],
        }
        for town in draw.sample(towns, num_articles)
    ]


def _make_paragraph(draw: random.Random, town: str, name: str, no_answer: bool) -> dict[str, Any]:
    facts = draw.sample(_FACTS, _SENTENCES_EACH + 1)
    context = ""
    questions: list[dict[str, Any]] = []
    for number, (sentence, question, answer) in enumerate(facts[:-1]):
        words = _draw_words(draw, town)
        text = sentence.format(**words)
        start = text.index(answer.format(**words)) + len(context)
        answers = [{"text": answer.format(**words), "answer_start": start}]
        questions.append(
            {"id": f"{name}-{number}", "question": question.format(town=town), "answers": answers}
        )
        context += text + " "
    if no_answer:
        text = facts[-1][1].format(town=town)
        questions.append({"id": f"{name}-none", "question": text, "answers": [], "is_impossible": True})
    return {"context": context.rstrip(), "qas": questions}


def _draw_words(draw: random.Random, town: str) -> dict[str, str]:
    return {
        "town": town,
        "person": f"{draw.choice(_FIRST_NAMES)} {draw.choice(_LAST_NAMES)}",
        "year": str(draw.randrange(1100, 1950)),
        "number": str(draw.randrange(2000, 9999)),
        "stone": draw.choice(_STONES),
        "goods": draw.choice(_GOODS),
        "water": draw.choice(_WATERS),
    }
