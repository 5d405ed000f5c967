"""What the lanes counted, merged, is what one metric counts over all samples."""

from functools import partial
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchmetrics import (
    MaxMetric,
    MeanMetric,
    Metric,
    MetricCollection,
    MinMaxMetric,
    MinMetric,
    SumMetric,
)
from torchmetrics.aggregation import CatMetric
from torchmetrics.classification import (
    BinaryAUROC,
    MulticlassAccuracy,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
)
from torchmetrics.regression import ConcordanceCorrCoef, NormalizedRootMeanSquaredError, PearsonCorrCoef
from torchmetrics.retrieval import RetrievalMAP

from lanewise.errors import TaskError
from lanewise.metrics import (
    LaneMetrics,
    MetricStates,
    check_metrics,
    load_merged,
    merge_metrics,
    take_states,
)

CLASSES = 4


@st.composite
def lanes_of_numbers(draw, numbers):
    """A list of numbers, and the same list cut into one to several lanes."""
    values = draw(st.lists(numbers, min_size=1, max_size=40))
    cuts = draw(st.sets(st.integers(1, len(values))))
    edges = sorted({0, *cuts, len(values)})
    return values, [values[start:stop] for start, stop in pairwise(edges)]


def build_counters() -> dict[str, Metric]:
    """Metrics whose states are integers."""
    return {
        "accuracy": MulticlassAccuracy(CLASSES, average="micro"),
        "f1": MulticlassF1Score(CLASSES, average="macro"),
        "auroc": BinaryAUROC(thresholds=5),
        "confusion": MulticlassConfusionMatrix(CLASSES),
    }


def count(samples: list[tuple[int, int]], micro_batch_size: int) -> dict[str, Metric]:
    metrics = build_counters()
    for batch in torch.tensor(samples).split(micro_batch_size):
        predictions, labels = batch.unbind(1)
        for name, metric in metrics.items():
            if name == "auroc":
                metric.update(predictions / CLASSES, labels % 2)
            else:
                metric.update(predictions, labels)
    return metrics


CLASS = st.integers(0, CLASSES - 1)


@settings(deadline=None, derandomize=True)
@given(cut=lanes_of_numbers(st.tuples(CLASS, CLASS)), micro_batch_size=st.integers(1, 5))
def test_any_cut_into_lanes_gives_the_value_over_all_samples(cut, micro_batch_size):
    samples, lanes = cut
    merged = merge_metrics(build_counters(), [take_states(count(lane, micro_batch_size)) for lane in lanes])
    expected = {name: metric.compute() for name, metric in count(samples, len(samples)).items()}
    for name in ("accuracy", "f1", "auroc"):
        assert merged[name] == float(expected[name])
    confusion = [merged[f"confusion/{row}/{column}"] for row in range(CLASSES) for column in range(CLASSES)]
    assert confusion == expected["confusion"].flatten().tolist()


def take(build, lanes) -> list[MetricStates]:
    """Update one metric for each lane, once for each of its numbers, and take the states."""
    states = []
    for lane in lanes:
        metric = build()
        for number in lane:
            metric.update(torch.tensor(float(number)))
        states.append(take_states({"m": metric}))
    return states


@settings(deadline=None, derandomize=True)
@given(cut=lanes_of_numbers(st.integers(-50, 50)))
def test_each_reduction_is_the_one_that_the_metric_declares(cut):
    numbers, lanes = cut
    for build, reduce in ((SumMetric, sum), (MaxMetric, max), (MinMetric, min)):
        assert merge_metrics({"m": build()}, take(build, lanes)) == {"m": reduce(numbers)}


@settings(deadline=None, derandomize=True)
@given(cut=lanes_of_numbers(st.integers(-50, 50)))
def test_lists_follow_each_other_in_lane_order(cut):
    numbers, lanes = cut
    merged = merge_metrics({"m": CatMetric()}, take(CatMetric, lanes))
    assert list(merged.values()) == numbers
    turned = merge_metrics({"m": CatMetric()}, take(CatMetric, lanes[::-1]))
    assert list(turned.values()) == [number for lane in lanes[::-1] for number in lane]


def test_floats_are_added_in_lane_order():
    lanes = [[1e8], [-1e8], [1.0]]
    assert merge_metrics({"m": SumMetric()}, take(SumMetric, lanes)) == {"m": 1.0}
    assert merge_metrics({"m": SumMetric()}, take(SumMetric, lanes[::-1])) == {"m": 0.0}  # 1 - 1e8 is -1e8


def test_a_list_without_a_reduction_is_the_lists_of_all_lanes():
    scores, targets = torch.tensor([0.9, 0.2, 0.6, 0.4]), torch.tensor([0, 1, 1, 0])
    queries = torch.tensor([0, 0, 1, 1])
    whole, lanes = RetrievalMAP(), []
    whole.update(scores, targets, indexes=queries)
    for part in ([0], [1, 2], [3]):  # both queries are spread over lanes
        metric = RetrievalMAP()
        metric.update(scores[part], targets[part], indexes=queries[part])
        lanes.append(take_states({"map": metric}))
    metrics = {"map": RetrievalMAP()}
    check_metrics(metrics)
    assert merge_metrics(metrics, lanes) == {"map": float(whole.compute())}


CORRELATIONS = {
    "PearsonCorrCoef": PearsonCorrCoef,
    "PearsonCorrCoef of 2": partial(PearsonCorrCoef, num_outputs=2),
    "ConcordanceCorrCoef": ConcordanceCorrCoef,
    "ConcordanceCorrCoef of 2": partial(ConcordanceCorrCoef, num_outputs=2),
}


@pytest.mark.parametrize("cuts", [[40], [13, 27], [1, 20, 19], [8, 8, 8, 8, 8]])
@pytest.mark.parametrize("name", CORRELATIONS)
def test_states_without_a_reduction_are_stacked_and_merged_by_the_metric(name, cuts):
    """They were refused, with a remedy that did not apply."""
    build = CORRELATIONS[name]
    shape = (40, 2) if name.endswith(" 2") else (40,)
    generator = torch.Generator().manual_seed(0)
    targets = torch.rand(shape, generator=generator) + 1
    scores = targets + 0.2 * torch.randn(shape, generator=generator)
    whole, lanes = build(), []
    whole.update(scores, targets)
    for part, target in zip(scores.split(cuts), targets.split(cuts), strict=True):
        metric = build()
        metric.update(part, target)
        lanes.append(take_states({"m": metric}))
    metrics = {"m": build()}
    check_metrics(metrics)
    merged = merge_metrics(metrics, lanes)
    assert list(merged.values()) == pytest.approx(whole.compute().reshape(-1).tolist(), rel=1e-4)
    # One after the other, as the micro-batches of a LightningModule come: they were stacked in stacks.
    so_far = lanes[:1]
    for lane in lanes[1:]:
        load_merged(metrics, [*so_far, lane])
        so_far = [take_states(metrics)]
    assert merge_metrics(metrics, so_far) == merged


class Unreduced(Metric):
    """Divides states that nobody merges, since it does not say how."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0))

    def update(self, value) -> None:
        self.total += value

    def compute(self):
        return self.total


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        (Unreduced(), r"metric odd \(Unreduced\) .*: state total declares no reduction.*a function of"),
        (NormalizedRootMeanSquaredError(), r"merges two of its states, and fails for more\. Use"),
        (MetricCollection([MeanMetric()]), r"metric odd \(MetricCollection\) is not a torchmetrics.Metric"),
        (MinMaxMetric(MeanMetric()), r"metric odd \(MinMaxMetric\) .*: it has no states of its own"),
    ],
)
def test_what_cannot_be_merged_is_an_error_that_names_the_metric(metric, said):
    with pytest.raises(TaskError, match=said):
        check_metrics({"fine": MeanMetric(), "odd": metric})


class Values(SumMetric):
    """Computes what it is told."""

    def __init__(self, value) -> None:
        super().__init__()
        self.value = value

    def compute(self):
        return self.value


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (3, {"m": 3.0}),
        (torch.tensor(3), {"m": 3.0}),
        (torch.tensor([3]), {"m": 3.0}),
        (torch.tensor([3, 4]), {"m/0": 3.0, "m/1": 4.0}),
        (torch.tensor([[3], [4]]), {"m/0": 3.0, "m/1": 4.0}),
        ((torch.tensor(3), torch.tensor([4, 5])), {"m/0": 3.0, "m/1/0": 4.0, "m/1/1": 5.0}),
        ({"low": torch.tensor(3), "high": [4, 5]}, {"m/low": 3.0, "m/high/0": 4.0, "m/high/1": 5.0}),
    ],
)
def test_several_values_are_named_after_their_metric(value, named):
    lanes = take(SumMetric, [[1.0]])
    assert merge_metrics({"m": Values(value)}, lanes) == named


def test_metrics_hold_the_states_of_one_lane_at_a_time():
    micro_batches = {0: [1.0, 2.0, 4.0], 1: [8.0], 2: [16.0, 32.0]}
    metrics = {"sum": SumMetric(), "all": CatMetric()}
    metrics["sum"].update(100.0)  # before
    of_lanes = LaneMetrics(metrics)
    for lane, number in [(0, 0), (1, 0), (2, 0), (0, 1), (2, 1), (0, 2)]:
        of_lanes.turn_to(lane)
        for metric in metrics.values():
            metric.update(micro_batches[lane][number])
        so_far = micro_batches[lane][: number + 1]
        assert metrics["sum"].compute().item() == sum(so_far)
        assert metrics["all"].compute().flatten().tolist() == so_far
        if number == len(micro_batches[lane]) - 1:
            of_lanes.end_lane()
    for lane, values in micro_batches.items():
        count, states = of_lanes.counted[lane]["all"]
        assert (count, torch.stack(states["value"]).flatten().tolist()) == (len(values), values)
        assert of_lanes.counted[lane]["sum"][1]["sum_value"].item() == sum(values)
