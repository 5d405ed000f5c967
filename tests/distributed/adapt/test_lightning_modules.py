"""LightningModules, read by lanewise.lightning: against the library, and on 1 to 3 processes."""

from importlib import import_module
from importlib.util import find_spec

import cloudpickle
import pytest
import torch

from lanewise.testing import run_distributed
from tests.distributed.adapt.test_trainers import train_run, train_runs

pytestmark = pytest.mark.skipif(find_spec("lightning") is None, reason="not installed: lightning")
MODULES = "tests.distributed.lightning_modules"
"""Which the processes import."""
CASES = ("autoencoder", "classifier", "transformer", "regression", "normalized")


def call(name, *args):
    """Call a function of that module in a new process."""
    return run_distributed(called, 1, name, args)[0]


def called(world, name, args):
    return getattr(import_module(MODULES), name)(world, *args)


def compare_with_the_library(world, max_steps):
    from tests.distributed.lightning_modules import losses_of_the_library, run_of

    given = {"train": {"max_steps": max_steps, "run_dir": "unused"}}
    ours = [train_run(world, cloudpickle.dumps(run_of(case, **given)))[0] for case in CASES]
    return [
        (losses_of_the_library(case, max_steps), losses) for case, losses in zip(CASES, ours, strict=True)
    ]


def read_runs(world):
    from tests.distributed.lightning_modules import run_of

    given = {"train": {"epochs": 2, "run_dir": "unused"}, "batch": {"global_batch_size": 12}}
    return [cloudpickle.dumps(run_of(case, **given)) for case in CASES]


def test_the_loss_is_that_of_the_library_for_fifty_steps():
    (compared,) = run_distributed(compare_with_the_library, 1, 50)
    for case, (theirs, ours) in zip(CASES, compared, strict=True):
        assert len(theirs) == 50, case
        assert ours == pytest.approx(theirs, rel=2e-5), case
        assert theirs[-1] < theirs[0], case


def test_one_to_three_processes_give_the_same_bytes():
    (runs,) = run_distributed(read_runs, 1)
    (alone,) = run_distributed(train_runs, 1, runs)
    for world_size in (2, 3):
        for result in run_distributed(train_runs, world_size, runs):
            assert result == alone


@pytest.mark.slow
def test_what_the_library_itself_does_on_one_and_on_two():
    """Of the table in docs/coming_from/lightning.md, its last column."""
    (alone,) = run_distributed(called, 1, "train_by_the_library", (8,))
    first, second = run_distributed(called, 2, "train_by_the_library", (8,))
    distances = {}
    for case, (weights, num_training, num_validation) in alone.items():
        assert (num_training, num_validation) in ((2 * 22, 2 * 9), (2 * 22, 0)), case
        assert first[case][1:] == second[case][1:]
        assert first[case][1:] == (22, 2 * 5 if num_validation else 0), case
        assert torch.equal(first[case][0], second[case][0]), case
        distances[case] = ((first[case][0] - weights).norm() / weights.norm()).item()
    assert distances.pop("normalized") > 1e-2
    assert distances.pop("token mean") > 1e-3
    assert max(distances.values()) < 1e-3


def test_a_run_validates_as_the_library_does(tmp_path):
    folder = str(tmp_path / "run")
    alone, of_two = (call("train_and_use", "classifier", devices, f"{folder}{devices}") for devices in (1, 2))
    assert alone == of_two
    ours = {name.removeprefix("val/"): value for name, value in alone["ours"].items()}
    assert ours["loss"] == pytest.approx(ours["val_loss"])
    del ours["loss"]
    assert ours == pytest.approx(alone["theirs"])


def test_the_module_gets_the_best_weights_where_the_run_keeps_them(tmp_path):
    """It got the last ones. And a run ended after its first epoch, where validation logs what it returns."""
    highest = {"best": "val/loss", "best_mode": "max"}  # that of the first epoch
    found = call("train_and_use", "regression", 1, str(tmp_path / "run"), 12, highest)
    step, best = found["best"]
    assert (step, found["ours"].keys()) == (2, {"val/loss", "val/small", "val/correlation", "val/ranks"})
    assert found["theirs"]["loss"] == pytest.approx(best)
    assert best > found["ours"]["val/loss"]


def test_a_validation_may_log_the_loss_that_it_returns(tmp_path):
    """The run ended after its first epoch, as there were two values of one name."""
    found = call("train_and_use", "regression", 1, str(tmp_path / "run"))
    assert found["ours"]["val/loss"] == pytest.approx(found["theirs"]["loss"])


def test_what_a_validation_logs_is_a_mean_over_samples_or_what_they_count(tmp_path):
    """Of 9 samples in fours the last counted as much as four, and correlations of three parts ended it."""
    found = call("train_and_use", "regression", 1, str(tmp_path / "run"), 4)
    assert {"loss", "small", "correlation", "ranks"} == set(found["theirs"])
    assert found["ours"] == {f"val/{name}": pytest.approx(value) for name, value in found["theirs"].items()}


def test_what_a_run_does_not_do_is_refused_by_name():
    said = call("what_is_said")
    assert "Adversarial has automatic_optimization=False, as a GAN" in said["Adversarial"]
    assert "Adversarial overrides on_train_epoch_end, which nothing here calls" in said["Adversarial"]
    assert "must return one optimizer, and at most one scheduler" in said["TwoOptimizers"]
    assert "it is no mean over samples. Return lanewise.Loss(sum, weight)" in said["TokenMean"]
    assert said["Weighted"] == ""
    assert "uses batch_idx, which depends on the number of devices" in said["Indexed"]
    assert "asks for trainer.current_epoch, which nothing here has" in said["Annealed"]
    assert "training_step draws random numbers in evaluation mode" in said["Noisy"]
    assert "is stepped with a metric. Give a section scheduler in its place" in said["Flat"]


def test_a_section_takes_the_place_of_a_scheduler_that_follows_a_metric():
    """The error that asks for the section was raised once more where it was given."""
    assert call("scheduler_of_a_plateau") == {"class_path": "torch.optim.lr_scheduler.ReduceLROnPlateau"}


def test_of_sorted_data_all_classes_are_looked_at():
    """The first samples, of one class, were: there these losses are, or seem to be, means over samples."""
    said = call("what_is_said_of_sorted_data")
    assert "as its cross_entropy has a weight: it is no mean over samples. Return" in said["ClassWeighted"]
    assert "for one of them: it is no mean over samples. Return" in said["OfPositives"]
    assert "is 0 or NaN in each micro-batch. Return" in said["none"]


def test_of_a_loader_all_is_read_or_it_is_refused():
    """A split by a sampler was validated on the whole dataset, and another collate_fn was not called."""
    said = call("what_is_said_of_loaders")
    assert "the training loader has a SequentialSampler in a BatchSampler. Use batch_size" in said["batches"]
    assert "the validation loader has a SubsetRandomSampler" in said["split"]
    assert "has another collate_fn than the training loader" in said["collate"]
    assert (said["right"], said["from_datasets"]) == ("val", "val")


def test_the_section_of_the_data_can_be_given_besides_the_loader():
    """The parameter `data` took its name, so `data={"drop_last": False}` of the page was a TypeError."""
    read, own = call("sections_of_a_loader_that_drops")
    assert (read["drop_last"], own["drop_last"]) == (True, False)
    assert own["order"] == read["order"] == "sequential"
