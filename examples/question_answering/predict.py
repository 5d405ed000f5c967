"""Writes a trained model's answers as the script of SQuAD reads them: `python predict.py RUN_DIR OUT`."""

import argparse
import json
from pathlib import Path

from question_answering import QuestionAnswering
from squad import Found, join
from windows import WindowDataset, collate_windows, find_spans

import lanewise
from lanewise.errors import LanewiseError


def predict(run_or_model: Path, questions: Path | None = None, devices: int = 1) -> dict[str, str]:
    """Return the answer to each question by its id.

    Args:
        run_or_model: a run directory, or a .safetensors file in one.
        questions: a file in the SQuAD format; None: the held-out questions of the run.
        devices: how many processes predict.
    """
    others = {} if questions is None else {"held_out": str(questions.resolve())}
    task, _ = lanewise.load(run_or_model, init_args=others)
    assert isinstance(task, QuestionAnswering)
    outputs = lanewise.predict(run_or_model, "held_out", task=task, devices=devices)
    windows = task.eval_datasets()["held_out"]
    assert isinstance(windows, WindowDataset)
    found = []
    for number, logits in enumerate(outputs):
        batch = collate_windows([windows[number]])
        num_tokens = batch.tokens.shape[1]
        places, scores = find_spans(logits[None, :num_tokens], batch, task.windows.max_answer_tokens)
        ((question, start, end),) = places.tolist()
        found.append(Found(question, start, end, scores.item()))
    return join(task.asked, found, task.threshold if task.no_answer else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="a run directory, or a .safetensors file in one")
    parser.add_argument("out", type=Path, help="gets the answers: {id of the question: answer}")
    parser.add_argument("--questions", type=Path, help="other questions, as a file in the SQuAD format")
    parser.add_argument("--devices", type=int, default=1)
    given = parser.parse_args()
    try:
        answers = predict(given.run, given.questions, given.devices)
    except LanewiseError as error:
        raise SystemExit(f"error: {error}") from None
    given.out.write_text(json.dumps(answers), encoding="utf-8")
    print(f"{len(answers)} answers in {given.out}")


if __name__ == "__main__":
    main()
