"""Where the one right item comes when all items are ranked by score: recall, NDCG and MRR."""

from collections.abc import Sequence
from typing import Any, final

import torch
from torchmetrics import Metric

from lanewise.errors import TaskError


@final
class RankingMetrics(Metric):
    """Recall, NDCG and MRR of rankings with one right item each, as in next-item recommendation.

        RankingMetrics(top_k=10)  # recall_at_10, ndcg_at_10 and mrr

    With r the rank of the right item, counted from 1, `recall_at_k` is the share of rankings with r <= k,
    `ndcg_at_k` the mean of 1 / log2(1 + r) where r <= k and 0 elsewhere, and `mrr` the mean of 1 / r.

    Ties count against the ranking: an item that is scored like the right one comes before it, and so does one
    whose score is NaN. A model that scores all items alike ranks the right one last. An item that shall not
    be ranked gets the score -inf; if that is the right one, it comes last.

    The states are sums, however many rankings there are. Recall and NDCG are computed from whole numbers, so
    they are the same in whatever order and in however many parts the rankings are counted. The sum of 1 / r
    is a float64, in the order of the micro-batches of each lane and then of the lanes.

    Args:
        top_k: the cutoff k, or several.
        options: those of `torchmetrics.Metric`.

    Raises:
        TaskError: if there is no cutoff, or one is less than 1.
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False

    rank_counts: torch.Tensor
    """int64 [largest cutoff]: how often the right item came first, second, and so on."""
    num_rankings: torch.Tensor
    """int64: rankings, whatever the rank."""
    reciprocal_ranks: torch.Tensor
    """float64: the sum of 1 / r."""

    def __init__(self, top_k: int | Sequence[int] = 10, **options: Any) -> None:
        super().__init__(**options)
        self.top_k = [top_k] if isinstance(top_k, int) else sorted(set(top_k))
        if not self.top_k or self.top_k[0] < 1:
            raise TaskError(f"top_k of RankingMetrics must be one or more numbers from 1 on: got {top_k}.")
        for name, default in (
            ("rank_counts", torch.zeros(self.top_k[-1], dtype=torch.int64)),
            ("num_rankings", torch.tensor(0)),
            ("reciprocal_ranks", torch.tensor(0, dtype=torch.float64)),
        ):
            self.add_state(name, default, dist_reduce_fx="sum")

    def update(self, scores: torch.Tensor, targets: torch.Tensor) -> None:
        """Count rankings.

        Args:
            scores: [rankings, items], of any floating type.
            targets: int64 [rankings]: which item is the right one.

        Raises:
            TaskError: if they have other shapes.
        """
        if scores.ndim != 2 or targets.shape != scores.shape[:1]:
            raise TaskError(
                "RankingMetrics takes scores [rankings, items] and targets [rankings]: got "
                f"{list(scores.shape)} and {list(targets.shape)}. Of a sequence, give the position to judge."
            )
        lower = scores < scores.gather(1, targets[:, None])  # no NaN is lower, and nothing lower than a NaN
        ranks = scores.shape[1] - lower.sum(1)
        places = torch.arange(1, len(self.rank_counts) + 1, device=ranks.device)
        self.rank_counts += (ranks[:, None] == places).sum(0)
        self.num_rankings += len(ranks)
        self.reciprocal_ranks += ranks.double().reciprocal().sum()

    def compute(self) -> dict[str, torch.Tensor]:
        """Return the metrics by name; of no rankings, NaN."""
        ranks = torch.arange(1, len(self.rank_counts) + 1, device=self.rank_counts.device)
        gains = self.rank_counts / (1 + ranks).double().log2()
        recalls = {
            f"recall_at_{k}": self.rank_counts[:k].sum() / self.num_rankings.double() for k in self.top_k
        }
        ndcgs = {f"ndcg_at_{k}": gains[:k].sum() / self.num_rankings for k in self.top_k}
        return {**recalls, **ndcgs, "mrr": self.reciprocal_ranks / self.num_rankings}
