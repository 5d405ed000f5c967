"""Recall, NDCG and MRR against a computation by sorting, in parts and merged over lanes."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lanewise.errors import TaskError
from lanewise.metrics import RankingMetrics, check_metrics, merge_metrics, take_states

SCORES = st.sampled_from([-math.inf, -1.5, 0.0, 0.25, 3.0, math.inf])
"""Few, so that many are tied."""


@st.composite
def rankings(draw, numbers=SCORES):
    """Scores and the right item of each of some rankings over a few items."""
    num_items = draw(st.integers(1, 7))
    row = st.tuples(st.lists(numbers, min_size=num_items, max_size=num_items), st.integers(0, num_items - 1))
    return draw(st.lists(row, min_size=1, max_size=12))


def rank_by_sorting(scores: list[float], target: int) -> int:
    """Sort the items from best to worst, the right one behind those that are scored alike."""
    order = sorted(range(len(scores)), key=lambda item: (-scores[item], item == target))
    return 1 + order.index(target)


def expected(rows, top_k: list[int]) -> dict[str, float]:
    ranks = [rank_by_sorting(*row) for row in rows]
    values = {"mrr": sum(1 / rank for rank in ranks) / len(ranks)}
    for k in top_k:
        values[f"recall_at_{k}"] = sum(rank <= k for rank in ranks) / len(ranks)
        values[f"ndcg_at_{k}"] = sum(1 / math.log2(1 + rank) for rank in ranks if rank <= k) / len(ranks)
    return values


def count(rows, top_k) -> RankingMetrics:
    metric = RankingMetrics(top_k)
    for scores, target in rows:
        metric.update(torch.tensor([scores]), torch.tensor([target]))
    return metric


@given(rankings(), st.sets(st.integers(1, 9), min_size=1).map(sorted))
def test_the_values_are_those_of_sorted_items(rows, top_k):
    metric = RankingMetrics(top_k)
    metric.update(torch.tensor([scores for scores, _ in rows]), torch.tensor([target for _, target in rows]))
    values = {name: value.item() for name, value in metric.compute().items()}
    assert values == pytest.approx(expected(rows, top_k), abs=1e-12)


@given(rankings(), st.integers(1, 4), st.randoms(use_true_random=False))
def test_parts_in_any_order_merge_to_the_same_recall_and_ndcg(rows, num_lanes, shuffler):
    whole = merge_metrics({"m": RankingMetrics(3)}, [take_states({"m": count(rows, 3)})])
    shuffler.shuffle(rows)
    metrics = {"m": RankingMetrics(3)}
    check_metrics(metrics)
    lanes = [take_states({"m": count(rows[lane::num_lanes], 3)}) for lane in range(num_lanes)]
    merged = merge_metrics(metrics, lanes)
    assert merged.pop("m/mrr") == pytest.approx(whole.pop("m/mrr"), abs=1e-15)
    assert merged == whole
    assert set(whole) == {"m/recall_at_3", "m/ndcg_at_3"}


@pytest.mark.parametrize(
    ("scores", "rank"),
    [
        ([0.0, 0.0, 0.0, 0.0], 4),
        ([math.nan, 1.0, 0.0, 0.0], 4),  # the right one is NaN
        ([1.0, math.nan, 0.0, 0.0], 2),
        ([-math.inf, -math.inf, 0.0, 0.0], 4),
        ([1.0, -math.inf, 0.0, 0.0], 1),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ties_and_what_is_no_number_count_against_the_right_item(scores, rank, dtype):
    metric = RankingMetrics(4)
    metric.update(torch.tensor([scores], dtype=dtype), torch.tensor([0]))
    assert metric.compute()["mrr"] == 1 / rank


def test_the_state_does_not_grow_and_stays_of_its_types():
    metric = RankingMetrics([5, 20]).half()
    for _ in range(3):
        metric.update(torch.rand(100, 50), torch.arange(100) % 50)
    assert {name: (state.dtype, state.numel()) for name, state in metric.metric_state.items()} == {
        "rank_counts": (torch.int64, 20),
        "num_rankings": (torch.int64, 1),
        "reciprocal_ranks": (torch.float64, 1),
    }


@pytest.mark.parametrize("top_k", [0, [], [3, -1]])
def test_a_cutoff_that_is_none_is_an_error(top_k):
    with pytest.raises(TaskError, match=r"must be one or more numbers from 1 on"):
        RankingMetrics(top_k)


def test_scores_of_a_whole_sequence_are_an_error():
    with pytest.raises(TaskError, match=r"\[2, 3, 5\] and \[2, 3\]\. Of a sequence, give the position"):
        RankingMetrics().update(torch.zeros(2, 3, 5), torch.zeros(2, 3, dtype=torch.int64))
