"""Evaluation: each sample once, and the same floats on any number of processes."""

import dataclasses
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset
from torchmetrics import Accuracy, F1Score, MeanMetric, Metric
from torchmetrics.classification import BinaryAUROC
from torchmetrics.retrieval import RetrievalNormalizedDCG

from lanewise import Callback, Loss, Task
from lanewise.config import DataConfig, EvaluateConfig
from lanewise.config.better import Mode
from lanewise.engine.engine import Engine, build_engine
from lanewise.engine.evaluation.evaluation import Evaluation, build_evaluator
from lanewise.engine.precision import Precision
from lanewise.engine.run.build import build_run
from lanewise.engine.step.lanes import LaneRunner
from lanewise.engine.step.wire import Votes
from lanewise.errors import ConfigError, DataError, TaskError
from lanewise.lanes import Placement
from lanewise.processes.device.determinism import set_determinism
from lanewise.processes.world.world import LocalWorld
from lanewise.runs.dir import RunDir
from lanewise.testing import run_distributed
from tests.distributed.tasks import configure
from tests.slow import slow

CLASSES = 5
NUM_SAMPLES, NUM_FEW, NUM_LANES = 1003, 3, 8


class Scores(Dataset[dict[str, torch.Tensor]]):
    """Random scores, labels and queries; the samples of the whole task are numbered."""

    def __init__(self, num_samples: int, first: int = 0) -> None:
        generator = torch.Generator().manual_seed(3)
        self.scores = torch.randn(num_samples, CLASSES, generator=generator)
        self.labels = torch.randint(CLASSES, (num_samples,), generator=generator)
        self.labels[:2] = torch.arange(min(2, num_samples))  # both classes, in the smallest set as well
        self.queries = torch.randint(40, (num_samples,), generator=generator)
        self.numbers = torch.arange(first, first + num_samples)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {
            "scores": self.scores[index],
            "labels": self.labels[index],
            "queries": self.queries[index],
            "number": self.numbers[index],
        }


class Ranking(Task):
    """Judges given scores; the model adds dropout, which evaluation must not apply, and BatchNorm."""

    def __init__(self, num_samples: int = NUM_SAMPLES) -> None:
        self.dataset = Scores(num_samples)
        self.evaluated: list[int] = []

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(CLASSES, CLASSES), nn.BatchNorm1d(CLASSES), nn.Dropout(0.5))

    def train_dataset(self) -> Dataset[Any]:
        return Scores(64)

    def eval_datasets(self) -> Mapping[str, Dataset[Any]]:
        return {"test": self.dataset, "few": Scores(NUM_FEW, first=len(self.dataset))}

    def forward(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch["scores"]) / 3

    def loss(self, outputs: torch.Tensor, batch: Any) -> Any:
        weights = 1 + batch["queries"].float()
        losses = F.cross_entropy(outputs, batch["labels"], reduction="none")
        return Loss((losses * weights).sum(), weights.sum())

    def build_metrics(self) -> Mapping[str, Metric]:
        return {
            "accuracy": Accuracy(task="multiclass", num_classes=CLASSES),
            "f1": F1Score(task="multiclass", num_classes=CLASSES, average="none"),
            "auroc": BinaryAUROC(),
            "ndcg": RetrievalNormalizedDCG(),
            "mean_score": MeanMetric(),
        }

    def update_metrics(self, metrics: Mapping[str, Any], outputs: torch.Tensor, batch: Any) -> None:
        self.evaluated += batch["number"].tolist()
        metrics["accuracy"].update(outputs, batch["labels"])
        metrics["f1"].update(outputs, batch["labels"])
        # Logits would not do: torchmetrics takes a batch whose scores all lie in 0..1 for probabilities.
        metrics["auroc"].update(outputs[:, 0].sigmoid(), batch["labels"] == 0)
        metrics["ndcg"].update(outputs[:, 0], batch["labels"] == 0, indexes=batch["queries"])
        metrics["mean_score"].update(outputs)


def evaluate(world, config) -> tuple[dict[str, float], list[int]]:
    set_determinism("exact", 1)
    engine = build_engine(config, world)
    task = engine.run.runner.task
    placement = Placement.of(config.batch.num_lanes, world)
    evaluator = build_evaluator(config, engine.run.runner, engine.training.model, world, placement)
    assert evaluator is not None
    values = evaluator.run()
    assert engine.training.model.training
    return values, task.evaluated


CONFIG = configure(Ranking, num_lanes=NUM_LANES, micro_batch_size=16)


@pytest.fixture(scope="module")
def alone():
    return run_distributed(evaluate, 1, CONFIG)[0]


@pytest.mark.parametrize("world_size", [3, *slow(2, 4, 7)])
def test_every_value_is_the_same_float_and_each_sample_is_evaluated_once(alone, world_size):
    results = run_distributed(evaluate, world_size, CONFIG)
    assert [values for values, _ in results] == [alone[0]] * world_size
    numbers = [number for _, evaluated in results for number in evaluated]
    assert sorted(numbers) == list(range(NUM_SAMPLES + NUM_FEW))

    num_few = [sum(number >= NUM_SAMPLES for number in evaluated) for _, evaluated in results]
    num_others = [len(evaluated) - few for (_, evaluated), few in zip(results, num_few, strict=True)]
    num_lanes_each = math.ceil(NUM_LANES / world_size)
    assert max(num_others) <= num_lanes_each * math.ceil(NUM_SAMPLES / NUM_LANES)
    assert max(num_few) <= num_lanes_each
    assert min(num_few) == 0, "no process was without samples"


def test_values_are_those_of_torchmetrics_on_the_whole_set(alone):
    from lanewise.processes.world.world import LocalWorld

    values, evaluated = alone
    assert evaluated == list(range(NUM_SAMPLES + NUM_FEW))
    engine = build_engine(CONFIG, LocalWorld(torch.device("cpu")))
    task, model = engine.run.runner.task, engine.training.model.eval()
    for name, dataset in task.eval_datasets().items():
        batch = task.collate([dataset[index] for index in range(len(dataset))])
        with torch.no_grad():
            outputs = task.forward(model, batch)
            loss = task.loss(outputs, batch)
        metrics = task.build_metrics()
        task.update_metrics(metrics, outputs, batch)
        assert values[f"{name}/loss"] == pytest.approx(float(loss.sum / loss.weight), rel=1e-6)
        for key in ("accuracy", "auroc", "ndcg", "mean_score"):
            assert values[f"{name}/{key}"] == pytest.approx(float(metrics[key].compute()), rel=1e-5)
        per_class = [values[f"{name}/f1/{index}"] for index in range(CLASSES)]
        np.testing.assert_allclose(per_class, metrics["f1"].compute().numpy(), rtol=1e-6)


def test_a_prediction_is_sent_without_the_rest_of_its_micro_batch():
    """As views, on several processes on the CPU each was sent with the bytes of the whole micro-batch."""
    world = LocalWorld(torch.device("cpu"))
    engine = build_engine(CONFIG, world)
    task = engine.run.runner.task
    placement = Placement.of(CONFIG.batch.num_lanes, world)
    evaluator = build_evaluator(CONFIG, engine.run.runner, engine.training.model, world, placement)
    for name, dataset in task.eval_datasets().items():
        outputs = evaluator.predict(name)
        assert len(outputs) == len(dataset)
        assert all(output.untyped_storage().nbytes() == output.nbytes for output in outputs)


class Named(NamedTuple):
    scores: torch.Tensor
    name: Any


@dataclasses.dataclass(frozen=True)
class Made:
    scores: torch.Tensor
    inner: Any


class Containers(Task):
    """Its model returns what a function makes of the numbers of a micro-batch."""

    def __init__(self, make: Callable[[torch.Tensor], Any]) -> None:
        self.make = make

    def build_model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def train_dataset(self) -> Dataset[Any]:
        return TensorDataset(torch.arange(20.0)[:, None])

    def eval_datasets(self) -> Mapping[str, Any]:
        return {"all": self.train_dataset(), "few": TensorDataset(torch.arange(2.0)[:, None])}

    def forward(self, model: nn.Module, batch: Any) -> Any:
        return self.make(batch[0])

    def loss(self, _outputs: Any, batch: Any) -> torch.Tensor:
        return batch[0].mean()


def predict(world, make, name):
    config = configure(Ranking, num_lanes=4, micro_batch_size=3)
    runner = LaneRunner(Containers(make), Precision("float32", "cpu"), 0)
    placement = Placement.of(4, world)
    evaluator = build_evaluator(config, runner, nn.Linear(1, 1), world, placement)
    try:
        return evaluator.predict(name)
    except TaskError as error:
        return str(error)


def named(numbers: torch.Tensor) -> Any:
    return Named(numbers, [f"sample {number:g}" for number in numbers.flatten().tolist()])


def made(numbers: torch.Tensor) -> Any:
    return Made(numbers, [Named(numbers * 1j, numbers), None, OrderedDict(x=numbers.bool())])


def of_hugging_face(numbers: torch.Tensor) -> Any:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    return outputs.QuestionAnsweringModelOutput(start_logits=numbers, hidden_states=(numbers, numbers + 1))


def ragged(numbers: torch.Tensor) -> Any:
    return {"scores": [numbers] * (1 + int(numbers[0]) % 3), 5: (numbers, [math.nan] * len(numbers))}


def texts(numbers: torch.Tensor) -> Any:
    """Lists of several forms, and a tuple of texts, as torch's default collate makes it of them."""
    names = tuple(f"sample {number:g}" for number in numbers.flatten().tolist())
    spans = [{"begin": int(number), "tokens": list(range(int(number)))} for number in numbers]
    return names, {"spans": spans, "score": numbers}


def shown(outputs: list[Any]) -> list[str]:
    return [f"{type(output)} {output}" for output in outputs]


@pytest.mark.parametrize("make", [*slow(named), made, *slow(of_hugging_face, ragged), texts])
def test_predictions_are_in_the_containers_of_the_model_on_any_number_of_processes(make):
    alone = [run_distributed(predict, 1, make, name)[0] for name in ("all", "few")]
    assert [*map(len, alone)] == [20, 2]
    for expected, name, world_size in ((alone[0], "all", 2), (alone[1], "few", 3)):
        first, *others = run_distributed(predict, world_size, make, name)
        assert shown(first) == shown(expected)
        assert others == [[]] * (world_size - 1)


def test_each_sample_gets_its_own_entry_of_a_list():
    """Each got the lists and texts of its whole micro-batch."""
    predicted = predict(LocalWorld(torch.device("cpu")), texts, "all")
    assert [name for name, _ in predicted] == [f"sample {number}" for number in range(20)]
    assert [output["spans"]["tokens"] for _, output in predicted] == [
        list(range(number)) for number in range(20)
    ]


def too_few(numbers: torch.Tensor) -> Any:
    return {"scores": numbers, "names": ["a", "b"]}


def one_for_all(numbers: torch.Tensor) -> Any:
    return Named(numbers, "same")


def pair(numbers: torch.Tensor) -> Any:
    return numbers, (1, "two")


@pytest.mark.parametrize(
    ("make", "got"), [(too_few, "a list of 2"), (one_for_all, "str"), (pair, "a tuple of 2")]
)
def test_what_has_no_entry_for_each_sample_is_refused(make, got):
    said = predict(LocalWorld(torch.device("cpu")), make, "all")
    assert f"does not have one entry for each of the 3 samples: got {got}. Choose" in said


def of_another_kind_later(numbers: torch.Tensor) -> Any:
    return Made(numbers, numbers) if numbers[0] < 10 else Named(numbers, numbers)


def test_containers_that_only_other_processes_have_are_refused():
    assert len(run_distributed(predict, 1, of_another_kind_later, "all")[0]) == 20
    said, _ = run_distributed(predict, 2, of_another_kind_later, "all")
    assert said.startswith("some outputs of the model are in other containers than those of rank 0: ")
    assert "Named(0: tensor, 1: tensor)" in said


def no_tensor(numbers: torch.Tensor) -> Any:
    return {"logits": numbers, "more": list(numbers.numpy())}


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_is_no_tensor_is_refused_on_any_number_of_processes(world_size):
    for said in run_distributed(predict, world_size, no_tensor, "all"):
        assert said.startswith("outputs/more/0 cannot be predicted: it is a numpy.ndarray. Tensors, numbers")


class Remember(Callback):
    def __init__(self) -> None:
        self.seen: list[tuple[int, dict[str, float]]] = []

    def on_evaluation(self, epoch, step, values):
        self.seen.append((step, dict(values)))


def fit(world, config, folder):
    """Train, evaluating as configured; return what was observed, on rank 0, and the last values."""
    set_determinism("exact", 1)
    observer = Remember()
    values = build_engine(config, world).fit(RunDir(Path(folder)), [observer])
    return observer.seen, values


def with_evaluation(**options) -> Any:
    config = configure(Ranking, num_lanes=4, micro_batch_size=4, steps=9, num_samples=30)  # 4 steps an epoch
    return dataclasses.replace(config, evaluate=EvaluateConfig(**options))


@pytest.mark.parametrize(
    ("options", "steps"), [({}, [4, 8, 9]), ({"every_epochs": 2}, [8, 9]), ({"every_steps": 3}, [3, 6, 9])]
)
def test_it_is_done_every_so_often_and_at_the_end(tmp_path, options, steps):
    ((seen, _),) = run_distributed(fit, 1, with_evaluation(**options), str(tmp_path))
    assert [step for step, _ in seen] == steps


@pytest.mark.parametrize("mode", ["min", *slow("max")])
def test_the_best_model_is_kept_and_every_rank_agrees(tmp_path, mode):
    config = with_evaluation(every_steps=1, best="test/loss", best_mode=mode)
    (seen, values), second = run_distributed(fit, 2, config, str(tmp_path))
    assert second == ([], values)
    assert values == seen[-1][1]
    losses = [values["test/loss"] for _, values in seen]
    best = losses.index((min if mode == "min" else max)(losses))
    assert len(set(losses)) == len(losses), "else the test could not tell"
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, max_steps=best + 1))
    (tmp_path / "short").mkdir()
    run_distributed(fit, 1, config, str(tmp_path / "short"))
    assert (tmp_path / "best.safetensors").read_bytes() == (tmp_path / "short/model.safetensors").read_bytes()


def test_an_unknown_best_metric_is_an_error_before_training(tmp_path):
    with pytest.raises(
        RuntimeError,
        match=r"got test/acuracy. Did you mean test/accuracy. Use one of test/loss.* name one, as set/",
    ):
        run_distributed(fit, 1, with_evaluation(best="test/acuracy"), str(tmp_path))


class FixedEvaluator:
    """Gives these values, one in each evaluation."""

    keys = ("test/loss", "test/f1")
    modes: Mapping[str, Mode] = {}

    def __init__(self, *values: float, name: str = "test/f1/0") -> None:
        self.values, self.name = iter(values), name

    def run(self, _):
        return {self.name: next(self.values), "test/f1/1": 0.0}


def evaluation(*values: float, mode: str = "max", best: str = "test/f1/0") -> Evaluation:
    config = EvaluateConfig(every_steps=1, best=best, best_mode=mode)
    return Evaluation(config, FixedEvaluator(*values))


def test_the_lowest_loss_is_the_best_where_no_mode_is_given():
    config = EvaluateConfig(every_steps=1, best="test/loss")
    judged = Evaluation(config, FixedEvaluator(3.0, 1.0, 2.0, name="test/loss"))
    assert [judged.run()[1] for _ in range(3)] == [True, True, False]


class TwoKinds(Ranking):
    """Its few samples are judged by an error, the others by whether they are right."""

    def build_metrics(self) -> Mapping[str, Metric]:
        return {"error": MeanMetric(), "accuracy": Accuracy(task="multiclass", num_classes=CLASSES)}

    def update_metrics(self, metrics: Mapping[str, Any], outputs: torch.Tensor, batch: Any) -> None:
        if batch["number"][0] < NUM_SAMPLES:
            metrics["accuracy"].update(outputs, batch["labels"])
        else:
            metrics["error"].update(outputs.square().mean())


def test_a_metric_has_a_value_where_it_was_updated():
    """So each eval dataset has metrics of its own: the others were once NaN or 0 there, with a warning."""
    values, _ = evaluate(LocalWorld(torch.device("cpu")), configure(TwoKinds, steps=1))
    assert values.keys() == {"test/loss", "test/accuracy", "few/loss", "few/error"}


@pytest.mark.parametrize("mode", ["max", "min"])
def test_a_value_that_is_no_number_is_never_the_best(mode):
    """It once stayed the best for the rest of the run, as no number is more than it."""
    nan = float("nan")
    sign = 1 if mode == "max" else -1
    judged = evaluation(nan, sign * 1.0, nan, sign * 0.5, sign * 2.0, mode=mode)
    assert [judged.run()[1] for _ in range(5)] == [False, True, False, False, True]


def test_a_checkpoint_whose_best_value_is_no_number_goes_on():
    judged = evaluation(0.5)
    judged.load_state_dict({**judged.state_dict(), "best": float("nan")})
    assert judged.run()[1]


def test_a_checkpoint_whose_last_values_are_no_numbers_of_an_evaluation_is_refused():
    """Integers beyond every float would end the next save."""
    judged = evaluation(0.5)
    for value in (10**400, 1, None, "0.5"):
        with pytest.raises(ValueError, match="not the values of an evaluation"):
            judged.load_state_dict({**judged.state_dict(), "last": {"test/loss": value}})


def test_the_loss_has_one_value():
    with pytest.raises(ConfigError, match=r"got test/loss/x. Did you mean test/loss. Use one of"):
        evaluation(best="test/loss/x")


class Recorder:
    """Stands for what saves checkpoints."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def vote(self):
        return Votes()

    def wants_stop(self):
        return False

    def is_due_after(self, step, end, *, ends_run):
        return False

    def save(self, step, metric, *, stops):
        self.calls.append(("save", step, metric, stops))

    def finish(self):
        self.calls.append("finish")


def test_a_value_that_a_metric_turns_out_not_to_have_costs_no_step(tmp_path):
    run = build_run(with_evaluation(best="test/f1/typo", every_steps=2), LocalWorld(torch.device("cpu")))
    saving = Recorder()
    with pytest.raises(ConfigError) as caught:
        Engine(run, saving=saving).fit(RunDir(tmp_path))
    assert str(caught.value).startswith(
        "evaluate.best must be a value of an evaluation: got test/f1/typo. Use"
    )
    assert str(caught.value).endswith("The run was saved: correct it, and continue with --resume.")
    assert saving.calls == [("save", 1, None, False), "finish"]
    assert run.evaluation.is_due


class WithoutReduction(Metric):
    def __init__(self) -> None:
        super().__init__()
        self.add_state("values", default=torch.zeros(1), dist_reduce_fx=None)

    def update(self) -> None: ...

    def compute(self) -> torch.Tensor:
        return self.values


class Unmergeable(Ranking):
    def build_metrics(self):
        return {"odd": WithoutReduction()}


class NeverUpdated(Ranking):
    update_metrics = Task.update_metrics


class Broken(Ranking):
    """Raises in one of the functions that an evaluation calls."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def update_metrics(self, metrics: Mapping[str, Any], outputs: torch.Tensor, batch: Any) -> None:
        if self.where == "update_metrics":
            raise ValueError("broken")
        super().update_metrics(metrics, outputs, batch)

    def collate(self, samples: list[Any]) -> Any:
        if self.where == "collate" and samples[0]["number"] >= NUM_SAMPLES:
            raise ValueError("broken")
        return super().collate(samples)


@pytest.mark.parametrize(
    ("where", "num_workers", "place"),
    [
        ("update_metrics", 0, "in eval dataset test, lane 0, micro-batch 1, samples [0, 1, 2"),
        ("collate", 0, "in eval dataset few, lane 0, micro-batch 1, samples [0]"),
        ("collate", 1, "in eval dataset few, lane 0, micro-batch 1, samples [0]"),
    ],
)
def test_an_error_says_in_which_evaluation_dataset_and_samples_it_arose(tmp_path, where, num_workers, place):
    config = dataclasses.replace(
        configure(Broken, num_lanes=NUM_LANES, micro_batch_size=16, steps=1, where=where),
        data=DataConfig(num_workers=num_workers),
    )
    with pytest.raises(RuntimeError, match="ValueError: broken") as caught:
        run_distributed(fit, 1, config, str(tmp_path))
    assert str(caught.value).count(place) == 1
    assert str(caught.value).count("in the evaluation after step 1") == 1


class EmptyEvalSet(Ranking):
    def eval_datasets(self):
        return {"none": Scores(0)}


class Taken(Ranking):
    def eval_datasets(self):
        return {"train": Scores(8)}


class UpdatesAlone(Ranking):
    build_metrics = Task.build_metrics


class WithoutMetrics(Ranking):
    def build_metrics(self):
        return {}


def test_a_task_that_takes_its_metrics_back_is_evaluated_by_its_loss():
    values, _ = evaluate(LocalWorld(torch.device("cpu")), configure(WithoutMetrics, steps=1))
    assert values.keys() == {"test/loss", "few/loss"}


class WithoutNames(Ranking):
    def eval_datasets(self):
        return [Scores(8)]


@pytest.mark.parametrize(
    ("task", "said"),
    [
        (WithoutNames, "WithoutNames.eval_datasets must return datasets by name: got a list. Return a dict"),
        (Taken, "an eval dataset must not be called train: .* Call it train_set"),
        (UpdatesAlone, "UpdatesAlone has update_metrics, and no build_metrics whose metrics it could update"),
        (
            Unmergeable,
            r"metric odd \(WithoutReduction\) cannot be merged over lanes: state values declares no",
        ),
        (EmptyEvalSet, "the eval dataset none is empty"),
        (NeverUpdated, "NeverUpdated builds metrics but does not update them"),
    ],
)
def test_what_cannot_be_evaluated_is_an_error_before_the_first_step(task, said):
    with pytest.raises((TaskError, DataError), match=said):
        build_run(configure(task, steps=1), LocalWorld(torch.device("cpu")))
