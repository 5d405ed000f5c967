"""The example of question answering: its scores are the official ones, on any number of processes."""

import hashlib
import importlib
import json
import os
import random
import re
import string
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lanewise.errors import DataError
from lanewise.metrics import merge_metrics, take_states
from lanewise.testing import run_distributed
from tests.integration.command import ROOT, lanewise
from tests.script import run_script
from tests.slow import slow

EXAMPLE = ROOT / "examples" / "question_answering"
CONFIG = EXAMPLE / "question_answering.yaml"
MODULES = (
    "articles",
    "baselines",
    "features",
    "model",
    "prepare",
    "question_answering",
    "squad",
    "tokenizer",
)
SQUAD = Path(os.environ.get("LANEWISE_DATA", "/nonexistent")) / "squad" / "dev-v1.1.json"
needs_squad = pytest.mark.skipif(not SQUAD.exists(), reason="dev-v1.1.json is not in $LANEWISE_DATA/squad")


def load_example() -> SimpleNamespace:
    """Import the example's modules, and leave their names to other examples."""
    sys.path.insert(0, str(EXAMPLE))
    try:
        return SimpleNamespace(**{name: importlib.import_module(name) for name in (*MODULES, "windows")})
    finally:
        sys.path.remove(str(EXAMPLE))
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", None)).startswith(str(EXAMPLE)):
                del sys.modules[name]


qa = load_example()

# Windows so small that most questions come in several.
SMALL = (
    "--task.init_args.windows={max_tokens: 32, overlap: 8, max_answer_tokens: 8}",
    "--task.init_args.reader={width: 16, hidden: 16, dilations: [1, 2], dropout: 0.2}",
    "--batch={global_batch_size: 24, micro_batch_size: 4}",
    "--distributed.equality=exact",
)


# ---- the official evaluation, written again from its definition


def official_words(answer):
    kept = "".join(letter for letter in answer.lower() if letter not in set(string.punctuation))
    return re.sub(r"\b(a|an|the)\b", " ", kept).split()


def official_f1(given_answer, right, version):
    given_words, right_words = official_words(given_answer), official_words(right)
    same = sum((Counter(given_words) & Counter(right_words)).values())
    if version == 2 and (not given_words or not right_words):
        return int(given_words == right_words)
    if same == 0:
        return 0
    precision = 1.0 * same / len(given_words)
    recall = 1.0 * same / len(right_words)
    return (2 * precision * recall) / (precision + recall)


def official_scores(articles, answers, version):
    """Return exact match and F1 of predictions, as evaluate-v1.1.py and evaluate-v2.0.py define them."""
    exact = total_f1 = total = 0
    for article in articles:
        for paragraph in article["paragraphs"]:
            for asked in paragraph["qas"]:
                total += 1
                if asked["id"] not in answers:
                    continue
                right = [answer["text"] for answer in asked["answers"]]
                if version == 2:
                    right = [answer for answer in right if official_words(answer)] or [""]
                answer = answers[asked["id"]]
                exact += max(official_words(answer) == official_words(one) for one in right)
                total_f1 += max(official_f1(answer, one, version) for one in right)
    return {"exact_match": 100.0 * exact / total, "f1": 100.0 * total_f1 / total}


# Of letters, articles and punctuation, so that what is normalized away occurs.
ANSWERS = st.lists(
    st.sampled_from(["the", "An", "a", "cat", "Cat's", "1,000", "-", "'", " ", "  ", "of"])
).map(" ".join) | st.text(max_size=20)


@settings(max_examples=60)
@given(ANSWERS, ANSWERS)
def test_two_answers_compare_as_in_the_official_script(one, other):
    assert qa.squad.normalize(one) == " ".join(official_words(one))
    for version in (1, 2):
        expected = official_f1(one, other, version)
        assert qa.squad.f1(one, other, no_answer=version == 2) == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize("version", [1, 2])
def test_the_scores_of_a_predictions_file_are_the_official_ones(version):
    articles = qa.articles.make_articles(no_answer=version == 2)
    questions = qa.squad.list_questions(articles, no_answer=version == 2)
    draw = random.Random(0)
    answers = {}
    for question in questions[::2]:  # a missing answer is wrong
        words = question.context.split()
        start = draw.randrange(len(words))
        answers[question.id] = draw.choice(
            [" ".join(words[start : start + 3]), "", "the", *(text for _, text in question.answers)]
        )
    scores = qa.squad.score_answers(questions, answers, no_answer=version == 2)
    for name, value in official_scores(articles, answers, version).items():
        assert 0 < value < 100
        assert scores[name] == pytest.approx(value, rel=1e-12)


# ---- windows


@pytest.fixture(scope="module")
def generated():
    return qa.question_answering.generated_folder(no_answer=False)


@pytest.fixture(scope="module")
def cut(tmp_path_factory):
    """Return a folder of few articles."""
    folder = tmp_path_factory.mktemp("cut") / "data"
    articles = qa.articles.make_articles(no_answer=False, num_articles=12, paragraphs_each=2)
    qa.prepare.prepare(*qa.prepare.split(articles), folder, 500)
    return folder


def make_windows(folder, path=None, **sizes):
    task = qa.question_answering.QuestionAnswering(folder, windows=qa.windows.WindowConfig(**sizes))
    return task.make_windows(path or folder / "train.json", by_length=False)


def check_windows(dataset):
    """Each answer is whole in a window, and its tokens lead back to its text; every token is in a window."""
    answered, covered = set(), {}
    for window in (dataset[index] for index in range(len(dataset))):
        question = dataset.questions[window.question]
        places = list(zip(window.starts.tolist(), window.ends.tolist(), strict=True))
        covered.setdefault(window.question, set()).update(place for place in places if place[1])
        first, last = window.answer.tolist()
        if first:
            start, answer = question.answers[0]
            found = question.context[places[first][0] : places[last][1]]
            assert answer.strip() in found
            assert found[start - places[first][0] :].startswith(answer.rstrip())
            answered.add(window.question)
    assert answered == set(range(len(dataset.questions)))
    for number, places in covered.items():
        letters = {letter for start, end in places for letter in range(start, end)}
        context = dataset.questions[number].context
        assert all(index in letters for index, letter in enumerate(context) if not letter.isspace())


@settings(max_examples=5)
@given(overlap=st.integers(8, 20), room=st.integers(1, 30))
def test_each_answer_is_whole_in_a_window_whatever_their_size(cut, overlap, room):
    dataset = make_windows(cut, cut / "held_out.json", max_tokens=24 + overlap + room, overlap=overlap)
    check_windows(dataset)
    assert max(dataset.lengths()) <= 24 + overlap + room


@needs_squad
def test_each_answer_of_real_articles_is_whole_in_a_window(tmp_path):
    articles = qa.squad.read_articles(SQUAD)
    short = [{**article, "paragraphs": article["paragraphs"][:8]} for article in articles[:2]]
    qa.prepare.prepare(short[:1], short[1:], tmp_path / "squad", 1000)
    dataset = make_windows(tmp_path / "squad", max_tokens=160, overlap=80)
    check_windows(dataset)
    assert len(dataset) > 1.2 * len(dataset.questions)


def test_an_answer_with_blanks_around_it_is_found_and_a_passage_may_be_empty(cut, tmp_path):
    answer = {"text": " red ", "answer_start": 11}
    context = "The rose is red today."
    asked = [
        {"context": context, "qas": [{"id": "blanks", "question": "Which colour?", "answers": [answer]}]},
        {"context": "", "qas": [{"id": "empty", "question": "Which colour?", "answers": []}]},
    ]
    file = tmp_path / "file.json"
    file.write_text(json.dumps({"data": [{"title": "x", "paragraphs": asked}]}))
    task = qa.question_answering.QuestionAnswering(cut, file, no_answer=True)
    windows = task.make_windows(file, by_length=False)
    assert len(windows) == 2
    first, last = windows[0].answer.tolist()
    assert context[windows[0].starts[first] : windows[0].ends[last]] == "red"
    batch = task.collate([windows[1]])
    logits = task.forward(task.build_model().eval(), batch)
    places, scores = qa.windows.find_spans(logits, batch, 8)
    assert places.tolist() == [[1, 0, 0]]
    assert scores.item() < -1000


def test_no_article_is_both_trained_on_and_held_out(generated):
    titles = [
        {article["title"] for article in qa.squad.read_articles(generated / f"{name}.json")}
        for name in ("train", "held_out")
    ]
    assert [len(part) for part in titles] == [60, 12]
    assert titles[0].isdisjoint(titles[1])


# ---- what is prepared


def prepare_at_once(world, folder):
    example = load_example()
    world.all_gather_tree(None)  # wait for each other
    articles = example.articles.make_articles(no_answer=False)
    example.prepare.prepare(*example.prepare.split(articles), Path(folder))
    tokenizer = example.tokenizer.train_tokenizer([str(articles)], 500)
    return {
        "tokenizer": hashlib.sha256(tokenizer.to_str().encode()).hexdigest(),
        **{path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in Path(folder).iterdir()},
    }


def test_processes_that_start_at_once_prepare_the_same_files(tmp_path):
    results = run_distributed(prepare_at_once, 3, str(tmp_path / "data"))
    assert len(results[0]) == 5
    assert results == [results[0]] * 3
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def write_articles(path, **changes):
    answer = {"text": "red", "answer_start": 11}
    asked = {"id": "q", "question": "Which colour?", "answers": [answer], **changes}
    articles = [{"title": "x", "paragraphs": [{"context": "The rose is red.", "qas": [asked]}]}]
    path.write_text(json.dumps({"data": articles}))
    return path


def test_a_mistake_in_the_data_is_one_clear_error(tmp_path, generated):
    file = tmp_path / "file.json"
    make_task = qa.question_answering.QuestionAnswering
    with pytest.raises(DataError, match="cannot be read"):
        make_task(generated, file)
    file.write_text("[]")
    with pytest.raises(DataError, match="no file in the SQuAD format"):
        make_task(generated, file)
    write_articles(file)
    with pytest.raises(DataError, match="'red' at 11, and the passage has ' re' there"):
        make_task(generated, file)
    write_articles(file, answers=[])
    with pytest.raises(DataError, match=r"Set task.init_args.no_answer: true"):
        make_task(generated, file)
    with pytest.raises(DataError, match=r"Make the folder with prepare.py"):
        make_task(tmp_path)
    with pytest.raises(DataError, match=r"Raise windows.max_tokens"):
        make_windows(generated, max_tokens=32, overlap=28)
    with pytest.raises(DataError, match="no question to hold out"):
        qa.prepare.prepare(qa.articles.make_articles(no_answer=False), [], tmp_path / "new")


def test_wrong_questions_are_left_out_of_training_if_so_asked(tmp_path, caplog):
    """As `skip_invalid_examples` does in AllenNLP; what is evaluated on must be right."""
    article = json.loads(write_articles(tmp_path / "right.json", answers=[]).read_text())["data"][0]
    passage = article["paragraphs"][0]
    places = {"right": [12], "none": [], "shifted": [11]}
    passage["qas"] = [
        {"id": name, "question": "What?", "answers": [{"text": "red", "answer_start": at} for at in starts]}
        for name, starts in places.items()
    ]
    held_out = json.loads(write_articles(tmp_path / "held_out.json").read_text())["data"]
    held_out[0]["paragraphs"][0]["qas"] = passage["qas"][:1]
    with pytest.raises(DataError, match="leave such questions out with on_error: skip"):
        qa.prepare.prepare([article], held_out, tmp_path / "data")
    with pytest.raises(DataError, match="question shifted"):
        qa.prepare.prepare([article], [article], tmp_path / "data", on_error="skip")
    qa.prepare.prepare([article], held_out, tmp_path / "data", on_error="skip")
    task = qa.question_answering.QuestionAnswering(tmp_path / "data", on_error="skip")
    assert [question.id for question in task.train_dataset().questions] == ["right"]
    assert "left out: 2 questions of" in caplog.text
    with pytest.raises(DataError, match="question shifted"):
        qa.question_answering.QuestionAnswering(tmp_path / "data").train_dataset()


# ---- the metric


@settings(max_examples=25)
@given(st.data())
def test_the_metric_joins_a_question_whatever_lane_its_windows_were_in(data):
    questions = qa.squad.list_questions(qa.articles.make_articles(no_answer=True)[:1], no_answer=True)

    def build():
        return {"squad": qa.squad.SquadScores(questions, no_answer=True)}

    rows = data.draw(
        st.lists(
            st.tuples(
                st.integers(0, len(questions) - 1), st.integers(0, 60), st.integers(0, 20), st.integers(-3, 3)
            ),
            min_size=1,
            max_size=40,
        )
    )
    values = []
    for num_lanes in (1, 3):
        lanes = {}
        for question, start, length, score in data.draw(st.permutations(rows)):
            lane = data.draw(st.integers(0, num_lanes - 1))
            places = torch.tensor([[question, start, start + length]])
            lanes.setdefault(lane, build())["squad"].update(places, torch.tensor([float(score)]))
        values.append(merge_metrics(build(), [take_states(lanes[lane]) for lane in sorted(lanes)]))
    assert values[0] == values[1]


# ---- trained for a bit


@pytest.fixture(scope="module")
def trained(tmp_path_factory, cut):
    run_dir = tmp_path_factory.mktemp("trained") / "run"
    steps = (f"--task.init_args.folder={cut}", "--train.max_steps=6", f"--train.run_dir={run_dir}")
    lanewise("train", CONFIG, *SMALL, *steps).require_success()
    return run_dir


def last_values(run_dir):
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    found = [line for line in lines if "held_out/squad/f1" in line][-1]
    return {name: value for name, value in found.items() if name.startswith("held_out/")}


def test_two_processes_leave_the_same_bytes_and_scores(tmp_path, trained, cut):
    options = ("--train.max_steps=6", f"--train.run_dir={tmp_path}", "--distributed.devices=2")
    lanewise("train", CONFIG, *SMALL, f"--task.init_args.folder={cut}", *options).require_success()
    assert (tmp_path / "model.safetensors").read_bytes() == (trained / "model.safetensors").read_bytes()
    assert last_values(tmp_path) == last_values(trained)


@pytest.mark.parametrize("devices", [*slow(2), 3])
def test_an_evaluation_on_any_number_of_processes_gives_the_same_scores(tmp_path, trained, devices):
    layout = f"--distributed.devices={devices}"
    file = tmp_path / "values.json"
    named = (trained / "averaged.safetensors", "--search_path", CONFIG.parent)
    lanewise("evaluate", *named, layout, f"--json={file}").require_success()
    assert json.loads(file.read_text())["values"] == last_values(trained)


def test_the_file_of_predictions_has_the_scores_of_the_evaluation(tmp_path, trained, cut):
    out = tmp_path / "answers.json"
    assert "20 answers" in run_script(
        EXAMPLE / "predict.py", trained / "averaged.safetensors", out, cwd=tmp_path
    )
    answers = json.loads(out.read_text())
    articles = qa.squad.read_articles(cut / "held_out.json")
    assert answers.keys() == {one.id for one in qa.squad.list_questions(articles, no_answer=False)}
    values = last_values(trained)
    for name, value in official_scores(articles, answers, version=1).items():
        assert values[f"held_out/squad/{name}"] == pytest.approx(value, rel=1e-12)


@pytest.mark.slow
def test_verify_finds_no_difference(tmp_path, cut):
    options = ("--devices=1,2", f"--train.run_dir={tmp_path}", "--train.max_steps=3")
    done = lanewise("verify", CONFIG, *SMALL, f"--task.init_args.folder={cut}", *options).require_success()
    assert "verified" in done.stdout


@pytest.mark.slow
def test_questions_without_an_answer(tmp_path):
    options = ("--task.init_args.no_answer=true", "--train.max_steps=2", f"--train.run_dir={tmp_path}")
    lanewise("train", CONFIG, *SMALL, *options).require_success()
    names = {name.rpartition("/")[2] for name in last_values(tmp_path)}
    assert names == {"loss", "exact_match", "f1", "has_answer_f1", "no_answer_f1"}


def test_no_answer_is_told_by_the_threshold():
    questions = [
        qa.squad.Question("a", "?", "one two", ((0, "one"),)),
        qa.squad.Question("b", "?", "one two", ()),
    ]
    found = [qa.squad.Found(0, 0, 3, 1.0), qa.squad.Found(1, 4, 7, -1.0), qa.squad.Found(1, 0, 3, -2.0)]
    assert qa.squad.join(questions, found) == {"a": "one", "b": "two"}
    answers = qa.squad.join(questions, found, threshold=0.0)
    assert answers == {"a": "one", "b": ""}
    scores = qa.squad.score_answers(questions, answers, no_answer=True)
    assert scores == {"exact_match": 100, "f1": 100, "has_answer_f1": 100, "no_answer_f1": 100}


def write_bert(folder, generated):
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(generated / "tokenizer.json"), pad_token="[PAD]", unk_token="[UNK]"
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
    )
    model = BertModel(config)
    model.save_pretrained(folder)
    return model


def test_a_pretrained_model_is_trained_from_a_local_folder(tmp_path, cut):
    bert = write_bert(tmp_path / "bert", cut)
    task = qa.question_answering.QuestionAnswering(pretrained=str(tmp_path / "bert"))
    given = task.build_model().model.bert.embeddings.word_embeddings.weight
    assert torch.equal(given, bert.embeddings.word_embeddings.weight)
    data = (f"--task.init_args.folder={cut}", f"--task.init_args.pretrained={tmp_path / 'bert'}")
    options = ("--train.max_steps=2", "--distributed.devices=2", f"--train.run_dir={tmp_path / 'run'}")
    lanewise("train", CONFIG, *SMALL, *data, *options).require_success()
    assert last_values(tmp_path / "run")["held_out/squad/f1"] >= 0


@pytest.mark.slow
def test_the_configuration_beside_that_of_allennlp_trains(tmp_path, cut):
    write_bert(tmp_path / "bert", cut)
    config = ROOT / "docs" / "coming_from" / "code" / "allennlp_qa_ours.jsonnet"
    models = []
    for devices in (1, 2):
        run_dir = tmp_path / str(devices)
        options = (*SMALL, "--task.init_args.reader=null", "--train.max_steps=2")
        data = (f"--task.init_args.folder={cut}", f"--task.init_args.pretrained={tmp_path / 'bert'}")
        layout = (f"--distributed.devices={devices}", f"--train.run_dir={run_dir}")
        lanewise("train", config, *options, *data, *layout).require_success()
        models.append((run_dir / "model.safetensors").read_bytes())
    assert models[0] == models[1]


# ---- learning


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_it_learns_the_generated_articles(tmp_path):
    options = (f"--train.run_dir={tmp_path}", "--distributed.devices=2")
    lanewise("train", CONFIG, *options, patience_seconds=900).require_success()
    assert last_values(tmp_path)["held_out/squad/f1"] > 80


@pytest.mark.slow
@pytest.mark.timeout(3600)
@needs_squad
def test_it_learns_from_nothing_to_answer_questions_about_other_articles(tmp_path):
    run_script(EXAMPLE / "prepare.py", SQUAD, tmp_path / "squad", cwd=tmp_path)
    options = (
        f"--task.init_args.folder={tmp_path / 'squad'}",
        f"--train.run_dir={tmp_path / 'run'}",
        "--distributed.devices=2",
        "--train.epochs=2",  # of three, after which it is better still
    )
    lanewise("train", CONFIG, *options, patience_seconds=3000).require_success()
    values = last_values(tmp_path / "run")
    assert values["held_out/squad/f1"] > 43
    assert values["held_out/squad/exact_match"] > 31
