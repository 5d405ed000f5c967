"""Makes what the example reads of files in the SQuAD format: `python prepare.py FILE FOLDER`."""

import argparse
import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from features import count_stems
from squad import Article, OnError, count_questions, list_questions, read_articles
from tokenizer import train_tokenizer

from lanewise.errors import DataError

EVERY = 6
"""Each article of so many is held out."""


def split(articles: Sequence[Article]) -> tuple[list[Article], list[Article]]:
    """Return the articles to train on, and those that are held out, of which no paragraph is trained on."""
    train = [article for number, article in enumerate(articles) if number % EVERY != EVERY - 1]
    return train, list(articles[EVERY - 1 :: EVERY])


def prepare(
    train: Sequence[Article],
    held_out: Sequence[Article],
    folder: Path,
    vocabulary_size: int = 6000,
    on_error: OnError = "raise",
) -> None:
    """Write the articles, the tokenizer and the counts of words into a new folder.

    Several processes may do that at once: the folder appears when it is complete, and the first one counts.

    Args:
        train: to train on.
        held_out: to evaluate on; none of its questions is left out.
        folder: must not be there.
        vocabulary_size: of the tokenizer.
        on_error: what becomes of wrong questions to train on.

    Raises:
        DataError: if there is nothing to train on, or nothing is held out.
    """
    asked = list_questions(train, no_answer=True, on_error=on_error)
    for questions, purpose in ((asked, "train on"), (list_questions(held_out, no_answer=True), "hold out")):
        if not questions:
            raise DataError(
                f"there is no question to {purpose}. Give at least {EVERY} articles, or a file of those "
                "that are held out."
            )
    contexts = [paragraph["context"] for article in train for paragraph in article["paragraphs"]]
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        _write(unfinished / "train.json", {"data": train})
        _write(unfinished / "held_out.json", {"data": held_out})
        _write(unfinished / "words.json", {"num_texts": len(contexts), "counts": count_stems(contexts)})
        train_tokenizer([*contexts, *(question.text for question in asked)], vocabulary_size).save(
            str(unfinished / "tokenizer.json")
        )
        unfinished.chmod(0o755)
        try:
            unfinished.rename(folder)
        except OSError:
            if not (folder / "tokenizer.json").exists():
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="articles, such as SQuAD's train-v1.1.json")
    parser.add_argument("folder", type=Path, help="a new folder, for task.init_args.folder")
    parser.add_argument(
        "--held-out", type=Path, help=f"held-out articles; without it, each {EVERY}th of FILE is held out"
    )
    parser.add_argument("--vocabulary-size", type=int, default=6000)
    parser.add_argument(
        "--on-error",
        choices=["raise", "skip"],
        default="raise",
        help="whether a wrong question to train on is an error or is left out, as task.init_args.on_error",
    )
    given = parser.parse_args()
    if given.folder.exists():
        raise SystemExit(f"error: {given.folder} exists. Name a new folder.")
    try:
        articles = read_articles(given.file, given.on_error)
        train, held_out = (articles, read_articles(given.held_out)) if given.held_out else split(articles)
        prepare(train, held_out, given.folder, given.vocabulary_size, given.on_error)
    except DataError as error:
        raise SystemExit(f"error: {error}") from None
    for name, part in (("train", train), ("held out", held_out)):
        print(f"{name}: {len(part)} articles, {count_questions(part)} questions")


if __name__ == "__main__":
    main()
