"""Whether more or less of a value is better, as its metric or its name tells."""

import re
from collections.abc import Mapping
from typing import Any, Literal

Mode = Literal["max", "min"]

_WORDS: Mapping[Mode, str] = {
    "min": """loss losses error errors mse mae mape msle ppl perplexity entropy divergence distance nll |
    err bpb bpc bpd ce bce kl wer cer mer ter eer ece fid lpips brier hamming l1 l2""",
    "max": """accuracy precision recall auc auroc bleu rouge rougel meteor iou dice ndcg mrr psnr ssim reward
    corrcoef correlation | acc top map ap f1 fmeasure r2 em match hit hits mcc kappa pearson success""",
}
"""How names end; after the bar stands what must be a word by itself."""
_REST = r"(?:[^a-z]*(?:score|rate|index|epoch|mean|avg|average|macro|micro|weighted|top|at|k))*[^a-z]*$"
"""What may follow: `f1_macro`, `error_rate`, `recall_at_10`."""


def mode_of(metric: Any) -> Mode | None:
    """Return what the `higher_is_better` of a torchmetric, or else of a part of it, says; None: nothing."""
    said = (getattr(part, "higher_is_better", None) for part in metric.modules())
    return next(("max" if is_higher else "min" for is_higher in said if isinstance(is_higher, bool)), None)


def mode_by_name(name: str) -> Mode | None:
    """Return min for the name of a loss or an error, max for that of a score, and None for any other.

    Args:
        name: as `set/metric`; of `set/metric/name` all that follows the set counts.
    """
    metric = name.lower().partition("/")[2]
    for mode, words in _WORDS.items():
        endings, alone = ("|".join(part.split()) for part in words.split("|"))
        if re.search(f"(?:{endings}|(?<![a-z])(?:{alone})){_REST}", metric):
            return mode
    return None
