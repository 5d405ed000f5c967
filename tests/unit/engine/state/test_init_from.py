"""A run begins with the weights of a file or of another run, and says which were missing or not used."""

import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from lanewise.commands.jobs.train import TrainJob
from lanewise.config import InitFromConfig, ReducerName
from lanewise.engine.engine import build_engine
from lanewise.engine.state.init_from import init_model
from lanewise.errors import CheckpointError
from lanewise.processes.device.determinism import set_determinism
from lanewise.processes.world.world import LocalWorld, World
from lanewise.runs.checkpoint.folder import CheckpointFolder
from lanewise.runs.checkpoint.model_file import load_model, save_model
from lanewise.testing import run_distributed
from tests.distributed.tasks import Smooth, configure, state_bytes


class Classifier(nn.Module):
    def __init__(self, num_classes: int = 2) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, num_classes)


def named(model: nn.Module, begin: str = "") -> dict[str, torch.Tensor]:
    return {f"{begin}{name}": value.clone() for name, value in model.state_dict().items()}


def filled(model: nn.Module, path: Path, **keys: Any) -> dict[str, torch.Tensor]:
    """What a model holds that began with the weights of a file."""
    init_model(model, InitFromConfig(path=str(path), **keys), rank=0)
    return named(model)


def said(caplog: pytest.LogCaptureFixture) -> tuple[str, str]:
    (record,) = caplog.records
    return record.levelname, record.getMessage()


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_file_of_this_model_gives_all_weights(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    source = Classifier()
    save_model(source, tmp_path / "model.safetensors")
    assert equal(filled(Classifier(), tmp_path / "model.safetensors"), named(source))
    assert said(caplog) == ("INFO", f"the run begins with 9 weights of {tmp_path}/model.safetensors")


def test_a_run_gives_its_average_where_it_has_one(tmp_path):
    source, average = Classifier(), Classifier()
    save_model(source, tmp_path / "model.safetensors")
    assert equal(filled(Classifier(), tmp_path), named(source))
    save_model(average, tmp_path / "averaged.safetensors")
    assert equal(filled(Classifier(), tmp_path), named(average))
    assert equal(filled(Classifier(), tmp_path / "model.safetensors"), named(source))


def test_a_run_gives_its_best_weights_where_it_keeps_them(tmp_path):
    """As `lanewise evaluate RUN` takes them."""
    last, best = Classifier(), Classifier()
    save_model(last, tmp_path / "model.safetensors")
    save_model(best, tmp_path / "best.safetensors")
    assert equal(filled(Classifier(), tmp_path), named(best))


def test_a_run_that_has_not_ended_names_what_it_lacks(tmp_path):
    with pytest.raises(
        CheckpointError, match=r"there is no .*/model\.safetensors\. .* such as .*/best\.safetensors"
    ):
        filled(Classifier(), tmp_path)


@pytest.mark.parametrize("key", ["", "state_dict", "model"])
def test_a_file_of_torch_is_a_state_dict_or_has_one(tmp_path, key):
    source = Classifier()
    optimizer = torch.optim.Adam(source.parameters())
    tree = {key: named(source), "epoch": 3, "optimizer": optimizer.state_dict(), "empty": {}}
    torch.save(tree if key else tree[key], tmp_path / "old.pt")
    assert equal(filled(Classifier(), tmp_path / "old.pt"), named(source))


class Payload:
    """Runs code if it is unpickled."""

    def __reduce__(self):
        return Path.touch, (Path("ran"),)


def test_a_file_of_torch_runs_no_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"state_dict": named(Classifier()), "args": Payload()}, "old.pt")
    with pytest.raises(CheckpointError, match=r"old\.pt is no file of torch\.save, or has more in it"):
        filled(Classifier(), Path("old.pt"))
    assert not Path("ran").exists()


@pytest.mark.parametrize("content", [b"", b"not a file of torch", b"\x80\x02N."])
@pytest.mark.parametrize("name", ["old.pt", "model.safetensors"])
def test_what_is_no_such_file_is_one_error(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=name):
        filled(Classifier(), tmp_path / name)


@pytest.mark.parametrize("name", ["none.pt", "none.safetensors"])
def test_a_file_that_is_not_there(tmp_path, name):
    with pytest.raises(CheckpointError, match=name):
        filled(Classifier(), tmp_path / name)


def test_two_states_are_one_too_many(tmp_path):
    torch.save({"model": named(Classifier()), "ema": named(Classifier())}, tmp_path / "old.pt")
    with pytest.raises(CheckpointError, match=r"it has 2\. Save the one that is meant"):
        filled(Classifier(), tmp_path / "old.pt")


def test_a_part_of_the_model_is_named_by_its_beginning(tmp_path, caplog):
    source = Classifier()
    state = named(source.encoder, "module.") | {"module.pooler": torch.ones(1)}
    save_file(state, tmp_path / "part.safetensors")
    model = Classifier()
    before = named(model)
    after = filled(model, tmp_path / "part.safetensors", prefixes={"module.": "encoder."})
    assert equal(after, {**named(source.encoder, "encoder."), **named(model.head, "head.")} | {
        name: before[name] for name in ("head.weight", "head.bias")
    })  # fmt: skip
    level, text = said(caplog)
    assert level == "WARNING"
    assert text.endswith(
        "; new, as they are not in it: head.weight, head.bias; not used, as they are not in the model: "
        "encoder.pooler"
    )


def test_another_head_is_left_out(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    source = Classifier(num_classes=7)
    save_model(source, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        filled(Classifier(), tmp_path / "model.safetensors")
    assert str(caught.value).endswith(
        "of other shapes than the model: head.weight (7, 4) and (2, 4); head.bias (7,) and (2,). To leave "
        "them new: train.init_from.leave_out=[head.weight, head.bias]."
    )
    model = Classifier()
    head = named(model.head)
    after = filled(model, tmp_path / "model.safetensors", leave_out=["head.*"])
    assert equal(named(model.head), head)
    assert torch.equal(after["encoder.0.weight"], source.encoder[0].weight)
    assert said(caplog)[0] == "INFO"


@pytest.mark.parametrize(
    ("keys", "what"),
    [
        ({"leave_out": ["heads.*"]}, r"no name fits 'heads\.\*'"),
        ({"prefixes": {"module.": ""}}, r"no name fits 'module\.'"),
        ({"prefixes": {"": "encoder."}}, "no name is in both"),
    ],
)
def test_what_fits_nothing_is_an_error(tmp_path, keys, what):
    save_model(Classifier(), tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{what}.*there are .* and 4 more; in the model"):
        filled(Classifier(), tmp_path / "model.safetensors", **keys)


def tied() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    return model


def test_unequal_values_of_a_tied_weight_are_an_error_unless_one_is_left_out(tmp_path):
    """The last one was taken, without a word."""
    file = tmp_path / "model.safetensors"
    save_file({"0.weight": torch.ones(2, 2), "1.weight": torch.zeros(2, 2)}, file)
    said = (
        "unequal values for weights that the model ties: 0.weight and 1.weight. Say which one does not count"
    )
    with pytest.raises(CheckpointError, match=re.escape(said)) as caught:
        filled(tied(), file)
    assert str(caught.value).endswith("train.init_from.leave_out=[1.weight].")
    assert torch.equal(filled(tied(), file, leave_out=["1.weight"])["1.weight"], torch.ones(2, 2))
    with pytest.raises(
        CheckpointError, match=r"0\.weight and 1\.weight are one tensor of the model, and unequal"
    ):
        load_model(tied(), file)


def test_a_tied_weight_that_is_written_once_is_not_missing(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    save_file({"0.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    model = tied()
    filled(model, tmp_path / "model.safetensors")
    assert torch.equal(model[1].weight, torch.ones(2, 2))
    assert said(caplog)[0] == "INFO"


def begun(world: World, reducer: ReducerName, file: str, prefix: str) -> dict[str, bytes]:
    """Train a step from the weights of a file, with an average; return what model and average hold."""
    config = configure(Smooth, num_lanes=4, steps=1)
    init_from = InitFromConfig(path=file, prefixes={prefix: ""})
    train = replace(config.train, init_from=init_from, ema_decay=0.5)
    distributed = replace(config.distributed, reducer=reducer)
    set_determinism("exact", threads=1)
    engine = build_engine(replace(config, train=train, distributed=distributed), world)
    list(engine.steps())
    training = engine.training
    assert training.average is not None
    return {**state_bytes(training.model), **state_bytes(training.average)}


def test_every_reducer_begins_with_the_same_weights(tmp_path):
    torch.manual_seed(1)
    model = Smooth().build_model()
    torch.save(named(model, "module."), tmp_path / "old.pt")
    expected = begun(LocalWorld(torch.device("cpu")), "ddp", str(tmp_path / "old.pt"), "module.")
    for reducer in ("ddp", "fsdp"):
        found = run_distributed(begun, 2, reducer, str(tmp_path / "old.pt"), "module.")
        assert found == [expected] * 2


def test_a_run_that_goes_on_does_not_read_the_file_and_says_with_what_it_began(tmp_path, caplog):
    """A checkpoint wins, also where the file is gone, and the next one still knows the first weights."""
    set_determinism("exact", threads=1)
    save_model(Smooth().build_model(), tmp_path / "model.safetensors")
    config = configure(Smooth, num_lanes=4, steps=2)

    def job(path: str, steps: int, *, resumes: bool = True) -> TrainJob:
        init_from = InitFromConfig(path=path)
        train = replace(config.train, init_from=init_from, max_steps=steps, run_dir=str(tmp_path / "run"))
        return TrainJob(replace(config, train=train), is_resumed=resumes)

    world = LocalWorld(torch.device("cpu"))
    first = job(str(tmp_path / "model.safetensors"), 1)  # there is no checkpoint yet
    with first.claim():
        first.run(world)
    (tmp_path / "model.safetensors").unlink()
    second = job("gone.safetensors", 2)
    with second.claim():
        assert second.run(world)["step"] == 2
    assert any("init_from was" in record.getMessage() for record in caplog.records)
    found = CheckpointFolder(second.run_dir.checkpoints).newest_good(logging.warning)
    assert found is not None
    assert found[1].identity["init_from"]["path"] == str(tmp_path / "model.safetensors")
    again = job("gone.safetensors", 3, resumes=False)
    with pytest.raises(CheckpointError, match=r"there is no gone\.safetensors"):
        again.run(world)
