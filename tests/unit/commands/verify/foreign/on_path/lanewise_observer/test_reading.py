"""Samples are read alike by any process, and identified by their place or by their content."""

import torch
from torch.utils.data import Subset, TensorDataset

from lanewise.commands.verify.foreign.on_path.lanewise_observer.reading import (
    Collate,
    LoaderPass,
    SameDraws,
    counts_of,
    digest,
    join,
    rows_of,
)


class Noisy:
    """Draws for each sample."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return index + torch.rand(())


def test_a_sample_is_read_alike_and_other_draws_stay_as_they_were():
    torch.manual_seed(3)
    dataset = SameDraws(Noisy())
    first = dataset[1]
    drawn = torch.rand(2)
    assert torch.equal(first, dataset[1])
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(2))


def draw_masks(samples):
    return {"masked": torch.stack(samples) * (torch.rand(len(samples), 3) < 0.5)}


def test_a_collate_that_draws_gives_each_rank_what_it_drew_alone(tmp_path):
    samples = list(torch.arange(12.0).reshape(4, 3))
    of_ranks = [
        Collate(draw_masks, 1, tmp_path / "no")(part)["masked"] for part in (samples[:2], samples[2:])
    ]
    together = Collate(draw_masks, 2, tmp_path / "unmatched")(samples)
    assert torch.equal(together["masked"], torch.cat(of_ranks))
    assert not (tmp_path / "unmatched").exists()
    Collate(draw_masks, 2, tmp_path / "unmatched")(samples[:3])
    assert (tmp_path / "unmatched").exists()


def test_a_collate_that_does_not_draw_gets_all_samples_together(tmp_path):
    assert Collate(len, 2, tmp_path / "no")([1, 2, 3, 4]) == 4


def test_batches_of_other_forms_are_not_joined():
    parts = [{"a": torch.zeros(2, 3)}, {"a": torch.zeros(2, 4)}]
    assert join(parts) is None
    assert join([(torch.zeros(1), torch.zeros(2, 3)), (torch.zeros(2), torch.zeros(1, 3))])[1].shape == (3, 3)
    assert join([torch.tensor(1.0)] * 2) is None


def test_targets_are_counted():
    labels = torch.tensor([[5, 6, -100], [7, 0, 1]])
    assert counts_of({"labels": labels, "name": "x"}) == {
        "samples": 2,
        "labels that are not 0": 5,
        "labels that are not -100": 5,
        "labels that are not -100, but for the first of each row": 3,
    }


def test_samples_of_subsets_are_known_by_their_place_in_the_whole_dataset():
    data = TensorDataset(torch.arange(10))
    held = LoaderPass(Subset(Subset(data, range(2, 9)), [3, 0, 4]), False, 0)
    assert [held.resolve(index) for index in range(3)] == [5, 2, 6]
    assert held.places(is_by_content=False) == {5: 0, 2: 1, 6: 2}
    other = LoaderPass(TensorDataset(torch.arange(5, 7)), False, 0)
    assert other.places(is_by_content=True)[held.digest(0)] == 0
    assert held.look_like() == LoaderPass(data, False, 0).look_like() != other.look_like()


def test_what_was_asked_for_and_not_given_out_does_not_count():
    held = LoaderPass(TensorDataset(torch.arange(10)), False, 0, indices=[[1, 2], [3, 4]], num_taken=1)
    assert held.note()["samples"] == [[1, 2]]


def test_a_digest_tells_values_types_and_names_apart():
    values = [
        torch.zeros(2),
        torch.zeros(2, dtype=torch.int32),
        torch.zeros(2, 1),
        {"a": 1},
        {"b": 1},
        [1],
        "1",
    ]
    assert len({digest(value) for value in values}) == len(values)
    assert digest({"a": torch.tensor(1.0)}) == digest({"a": torch.tensor(1.0)})


def test_what_enters_a_module_is_known_by_row_and_by_column():
    inputs = torch.arange(12).view(4, 3)
    assert rows_of((inputs[:2],), 0) + rows_of((inputs[2:],), 0) == rows_of((inputs,), 0)
    assert rows_of((inputs[:, 1:],), 1) == rows_of((inputs,), 1)[1:]
    targets, mask = torch.arange(4), torch.ones(3, 3)  # of which the mask is of no row
    assert rows_of((inputs, targets, mask), 0) == rows_of((inputs, targets), 0) != rows_of((inputs,), 0)
    assert rows_of((None, {"scale": torch.ones(())}), 0) == []
