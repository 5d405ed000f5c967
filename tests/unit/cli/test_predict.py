"""What `lanewise predict` writes, and what it refuses before it computes anything."""

import json

import pytest
import torch
from safetensors.torch import load_file

from lanewise.cli.main import main
from lanewise.cli.predict import _show, write
from lanewise.errors import TaskError


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ("answers.csv", "--output must end in .jsonl or .safetensors: got answers.csv."),
        ("nowhere/answers.jsonl", "--output nowhere/answers.jsonl is in no folder that is there"),
    ],
)
def test_where_nothing_could_be_written_nothing_is_computed(tmp_path, monkeypatch, capsys, output, said):
    monkeypatch.chdir(tmp_path)
    assert main(["predict", "no_such_run", "--output", output]) == 2
    assert said in capsys.readouterr().err


def test_a_line_of_json_is_a_sample_with_null_for_what_json_lacks(tmp_path):
    samples = [
        {"start": torch.tensor([1.5, torch.nan]), "rank": (torch.tensor(3), torch.tensor(True))},
        {"start": torch.tensor([torch.inf]), "rank": (torch.tensor(4), torch.tensor(False))},
    ]
    write(samples, tmp_path / "out.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert lines == [{"start": [1.5, None], "rank": [3, True]}, {"start": [None], "rank": [4, False]}]


def test_tensors_are_named_by_the_keys_that_lead_to_them(tmp_path):
    samples = [
        {"pair": (torch.full((2,), n), torch.tensor(n)), "score": torch.tensor(n / 2)} for n in range(3)
    ]
    write(samples, tmp_path / "out.safetensors")
    written = load_file(tmp_path / "out.safetensors")
    assert {name: value.tolist() for name, value in written.items()} == {
        "pair.0": [[0, 0], [1, 1], [2, 2]],
        "pair.1": [0, 1, 2],
        "score": [0, 0.5, 1],
    }


@pytest.mark.parametrize("second", [torch.zeros(3), {"other": torch.zeros(2)}])
def test_samples_of_several_shapes_make_no_tensor(tmp_path, second):
    with pytest.raises(TaskError, match=r"predictions differ in shape between samples.*jsonl"):
        write([torch.zeros(2), second], tmp_path / "out.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_text_is_written_as_json_and_makes_no_tensor(tmp_path):
    """A file of tensors left it out without a word."""
    samples = [{"name": name, "score": torch.tensor(1.0), "nothing": None} for name in ("a", "b")]
    write(samples, tmp_path / "out.jsonl")
    assert json.loads((tmp_path / "out.jsonl").read_text().splitlines()[1])["name"] == "b"
    said = r"predictions called name are of type str, and \.safetensors holds tensors only.*\.jsonl"
    with pytest.raises(TaskError, match=said):
        write(samples, tmp_path / "out.safetensors")
    write([{**sample, "name": None} for sample in samples], tmp_path / "out.safetensors")
    assert list(load_file(tmp_path / "out.safetensors")) == ["score"]


def test_json_has_no_complex_numbers(tmp_path):
    with pytest.raises(TaskError, match=r"ends in \.safetensors"):
        write([torch.zeros(2, dtype=torch.complex64)], tmp_path / "out.jsonl")
    assert list(tmp_path.iterdir()) == []


def test_it_says_how_many_samples_of_which_dataset_and_by_which_weights(tmp_path, capsys):
    result = {"dataset": "held_out", "outputs": [torch.zeros(1)] * 1200}
    _show(tmp_path / "out.jsonl", tmp_path / "model.safetensors", result)
    assert capsys.readouterr().out == (
        f"{tmp_path / 'out.jsonl'}: 1,200 samples of held_out, by {tmp_path / 'model.safetensors'}\n"
    )
