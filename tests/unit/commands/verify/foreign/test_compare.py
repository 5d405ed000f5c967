"""Each relation between the gradients of ranks and that of one process has its cause."""

import pytest
import torch

from lanewise.commands.verify.foreign.compare import (
    CannotTellError,
    compare_update,
    find_cause,
    write_replay,
)

OWN = torch.tensor([[1.0, 2.0, 0.5, -1.0], [3.0, -1.0, 0.25, 2.0]])
"""What each of two ranks computes as the mean over its targets: 54 on rank 0, 41 on rank 1."""


def gradients(values):
    return {"0.0.0": torch.as_tensor(values[:3]), "0.0.1": torch.as_tensor(values[3:])}


def noted(gradient, own, targets=1, notes=()):
    update = {
        "gradients": gradients(gradient),
        "own": gradients(own),
        "names": {"0.0.0": "encoder.weight"},
        "num_backwards": 1,
    }
    held = {"is_training": True, "counts": [{"samples": 8, "labels that are not -100": targets}]}
    return {"updates": [update], "passes": [held], "notes": list(notes)}


def compared(single, own, several=None, notes=()):
    """Compare ranks, which average their gradients unless told otherwise, with one process."""
    several = [own.mean(0)] * 2 if several is None else several
    ranks = [noted(several[rank], own[rank], (54, 41)[rank], notes) for rank in range(2)]
    return compare_update(ranks, noted(single, single), 0)


def cause(comparison, notes=()):
    return find_cause(comparison, notes).cause


def test_the_mean_of_equal_ranks_is_right():
    found = compared(OWN.mean(0), OWN)
    assert found.is_right
    assert found.is_reduced
    assert (round(found.factor, 6), found.apart) == (1, [])
    assert found.shares == pytest.approx([0.5, 0.5])


def test_a_mean_of_token_means_is_explained_by_the_tokens_of_each_rank():
    found = compared((54 * OWN[0] + 41 * OWN[1]) / 95, OWN)
    assert not found.is_right
    assert found.shares == pytest.approx([0.5684, 0.4316], abs=1e-4)
    finding = find_cause(found, [])
    assert finding.cause == "the loss is a mean of means"
    assert "54 to 41 is the proportion of labels that are not -100" in finding.evidence


def test_other_weights_of_ranks_are_not_explained_by_counts():
    assert cause(compared(0.8 * OWN[0] + 0.2 * OWN[1], OWN)) == (
        "the ranks' samples weigh otherwise than on one process"
    )


def test_a_sum_of_means_is_told_from_a_loss_that_is_multiplied():
    added = compared(OWN.mean(0), OWN, [OWN.sum(0)] * 2)
    multiplied = compared(OWN.mean(0), 2 * OWN)
    assert cause(added) == cause(multiplied) == "the gradient is 2 times too large"
    assert "added up" in find_cause(added, []).evidence
    assert "num_items_in_batch" in find_cause(multiplied, []).remedy


def test_a_mean_of_sums_is_too_small():
    assert cause(compared(OWN.sum(0), OWN)) == "the gradient is 2 times too small"


def test_gradients_that_are_not_reduced_are_named_first():
    found = compared(OWN.mean(0), OWN, list(OWN))
    assert not found.is_reduced
    finding = find_cause(found, ["draws"])
    assert finding.cause == "the ranks' gradients are not reduced"
    assert "1.0000 of rank 0's own + 0.0000 of rank 1's own" in finding.evidence


def test_a_parameter_that_is_not_reduced_is_named():
    single = OWN.mean(0)
    several = torch.stack([single, single])
    several[:, :3] = OWN[:, :3]
    found = compared(single, OWN, list(several))
    assert not found.is_reduced
    assert found.apart == ["encoder.weight"]


def test_a_gradient_that_is_no_sum_of_the_ranks_own_is_said_to_be_none():
    other = torch.tensor([0.0, 1.0, 5.0, 3.0])
    assert cause(compared(other, OWN)) == "the gradient is no sum of the ranks' own"


@pytest.mark.parametrize("note", ["draws", "collate"])
def test_what_draws_cannot_be_told(note):
    with pytest.raises(CannotTellError, match="draws random numbers"):
        find_cause(compared(torch.tensor([0.0, 1.0, 5.0, 3.0]), OWN), [note])


def test_a_gradient_of_zero_cannot_be_told():
    with pytest.raises(CannotTellError, match="zero or not finite"):
        compared(torch.zeros(4), OWN)


def test_rounding_in_half_precision_is_no_difference():
    single = OWN.mean(0) * torch.tensor([1.01, 1.0, 0.99, 1.0])
    assert not compared(single, OWN).is_right
    assert compared(single, OWN, notes=["half precision"]).is_right


def held(samples, **others):
    return {
        "is_training": True,
        "is_stream": False,
        "dataset": ["List", 9],
        "samples": samples,
        "digests": [[f"d{sample}" for sample in batch] for batch in samples],
        **others,
    }


def rank_of(*passes):
    return {"passes": list(passes), "updates": [{"updated": {"0.0.0": torch.ones(2)}}, {}]}


def test_one_process_reads_the_union_of_each_batch(tmp_path):
    evaluation = held([[0, 1]], is_training=False)
    ranks = [
        rank_of(evaluation, held([[1, 2], [5]]), held([[7]])),
        rank_of(held([[3, 4], [6]]), held([[8]])),
    ]
    write_replay(ranks, tmp_path / "replay")
    replay = torch.load(tmp_path / "replay", weights_only=True)
    assert replay["passes"] == {1: [[1, 2, 3, 4], [5, 6]], 2: [[7, 8]]}
    assert (replay["world_size"], replay["is_by_content"], len(replay["weights"])) == (2, False, 1)


def test_samples_of_other_datasets_are_known_by_content(tmp_path):
    ranks = [rank_of(held([[0, 1]])), rank_of(held([[0]], dataset=["List", 8]))]
    write_replay(ranks, tmp_path / "replay")
    replay = torch.load(tmp_path / "replay", weights_only=True)
    assert (replay["passes"], replay["is_by_content"]) == ({0: [["d0", "d1", "d0"]]}, True)


@pytest.mark.parametrize(
    ("passes", "why"),
    [
        ([], "no loader of torch"),
        ([held([[0]], is_training=False)], "no loader of torch"),
        ([held([], is_stream=True)], "samples of a stream"),
    ],
)
def test_samples_that_are_not_known_cannot_be_told(tmp_path, passes, why):
    with pytest.raises(CannotTellError, match=why):
        write_replay([rank_of(*passes), rank_of(*passes)], tmp_path / "replay")
