"""The classes of user code: a Task, which says what one device does, and the Loss that it returns."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn
from torch.utils.data import Dataset

from lanewise.data.collate import collate
from lanewise.errors import TaskError
from lanewise.lanes import PROGRESS, StepProgress

if TYPE_CHECKING:
    from torchmetrics import Metric


@dataclass(frozen=True)
class Loss:
    """The loss of one micro-batch, as a sum and the weight by which it counts.

    The gradient of a step is (sum over all lanes of grad(sum)) / (sum over all lanes of weight), whatever the
    unit of the weight is: tokens, pixels, pairs, samples.
    """

    sum: torch.Tensor
    """Scalar with a gradient: the loss added up over the micro-batch."""
    weight: torch.Tensor | float
    """How many units the sum counts for; not negative.

    A micro-batch without units may have a loss, as a picture without objects: with weight 0 its sum is added
    to those of the others, unless it is not finite or has no gradient, as where there is nothing to learn.

    If it is a tensor on an accelerator, each backward waits for it: count on the CPU, as in `collate`.
    """
    metrics: Mapping[str, tuple[torch.Tensor | float, torch.Tensor | float]] | None = field(
        default=None, kw_only=True
    )
    """What else to report, by name: a sum over the micro-batch and the weight by which it counts, as numbers
    or scalar tensors on any device, without a gradient.

    The means over the global batch and the logged steps become `train/<name>`, those over a dataset
    `<dataset>/<name>`. A lane that leaves out a name counts as (0, 0); in the first step of a run some lane
    must report each name.
    """
    gather: Mapping[str, Any] | None = field(default=None, kw_only=True)
    """What `before_update` and `after_update` get of all lanes, by name: tensors, in any containers and
    dataclasses, whose first dimension are rows, as many as the lane has. Rows are in lane order, without a
    gradient. Each lane with samples must give the same names, containers, dtypes and trailing shapes.
    """
    total: Mapping[str, Any] | None = field(default=None, kw_only=True)
    """What they get added up over all lanes, by name: tensors of equal shapes, likewise.

    Integers and bools are added as int64, bfloat16 and float16 as float32.
    """

    @classmethod
    def mean(
        cls,
        value: torch.Tensor,
        weight: torch.Tensor | float,
        *,
        metrics: Mapping[str, tuple[torch.Tensor | float, torch.Tensor | float]] | None = None,
        gather: Mapping[str, Any] | None = None,
        total: Mapping[str, Any] | None = None,
    ) -> "Loss":
        """Make a loss of a mean over `weight` units, as most models return it.

        A Hugging Face model returns the mean over the target tokens, so their number is the weight. A mean
        over nothing adds nothing.
        """
        added = value * weight
        return cls(added if weight else added.detach(), weight, metrics=metrics, gather=gather, total=total)


@dataclass(frozen=True)
class UpdatedStep:
    """A step that updates, as `Task.before_update` and `after_update` get it: the same on every process."""

    gathered: Mapping[str, Any]
    """The rows of all lanes in lane order, by the names of `Loss.gather`."""
    totals: Mapping[str, Any]
    """The sums over all lanes, by the names of `Loss.total`."""
    loss: float
    """Weighted mean of the loss over the global batch."""
    weight: float
    """Weight of the global batch."""
    num_samples: int
    """Samples of the global batch."""
    progress: StepProgress
    """Where in the run the step is."""


class Task(ABC):
    """The user's model, data and loss on one device; its constructor arguments are the configuration.

    Every process builds an equal task. Nothing in it may depend on the rank or the number of processes.
    """

    step_state: Sequence[str] = ()
    """Names of buffers, or of modules with all buffers below, that lanes only read: state of the whole step.

    They are not compared and merged in a step; a lane that changes one in the first steps is an error.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Note the constructor's arguments, so that a run started from Python leaves a configuration."""
        task = super().__new__(cls)
        object.__setattr__(task, "_init_arguments", (args, kwargs))  # a frozen dataclass may be a task
        return task

    @property
    def progress(self) -> StepProgress:
        """Where in the run the step is: for annealed weights, temperatures and curricula.

        It is that of the step for which `collate`, `forward`, the loss, `before_update` or `after_update`
        runs. In an evaluation, and for predictions, `number` counts the steps that the weights were trained,
        and `epoch` is that of the last one.

        Raises:
            TaskError: where no run gives it.
        """
        if (position := PROGRESS.get()) is None:
            raise TaskError(
                "self.progress is known in collate, forward, the losses, before_update, after_update, while "
                "lanewise trains or evaluates, or predicts with a run. In a loop of your own use "
                "step.number and step.epoch; with other weights, read it only where model.training is set."
            )
        return StepProgress(*position)

    @abstractmethod
    def build_model(self) -> nn.Module:
        """Return a new model on the CPU. Called on every rank, under equal random state."""

    @abstractmethod
    def train_dataset(self) -> Any:
        """Return the training dataset, map-style or a stream, equal on every rank. lanewise shares it out."""

    @abstractmethod
    def forward(self, model: nn.Module, batch: Any) -> Any:
        """Return the model's outputs for a collated micro-batch, which is on the model's device."""

    def loss(self, outputs: Any, batch: Any) -> Loss | torch.Tensor | Sequence[Loss]:
        """Return the micro-batch's loss; a bare scalar is taken as the mean over its samples.

        A task has either this method, or `batch_loss`, or `row_loss`. One with `loss_weights` returns several
        losses here.
        """
        raise NotImplementedError

    def loss_weights(self, batch: Any) -> Sequence[float | torch.Tensor] | None:
        """Return the weights of the losses where `loss` returns several: tokens for one, samples for another.

        Each loss is divided by its own weight over the global batch.

        Args:
            batch: the collated micro-batch, on the model's device; count on the CPU, as in `collate`.

        Returns:
            The weights, or None where only the loss knows them: then each forward runs twice.
        """
        raise NotImplementedError

    def batch_loss(self, model: nn.Module, outputs: Any, inputs: Any) -> Loss | torch.Tensor | Sequence[Loss]:
        """Return the loss of all samples of a step, which may compare each with all others.

        Every process calls it, with the same arguments, and must return the same. It may use parameters of
        the model, such as a temperature.

        Args:
            model: the model.
            outputs: what `forward` returned for all lanes, in lane order: tensors, in any nested containers,
                whose first dimension is the samples of the global batch.
            inputs: likewise, what `batch_loss_inputs` returned.

        Returns:
            A mean over the samples, a `Loss`, or several, each of which is divided by its own weight.
        """
        raise NotImplementedError

    def row_loss(self, model: nn.Module, outputs: Any, inputs: Any, rows: slice) -> Loss | torch.Tensor:
        """Return the loss of some of a step's samples, which may compare each with all others.

        In place of `batch_loss`, for losses that are sums over the samples: what exists at once is a lane's
        rows of the matrix of similarities, and no process repeats what another one does.

        Args:
            model: as for `batch_loss`.
            outputs: as for `batch_loss`: of all samples.
            inputs: as for `batch_loss`.
            rows: the samples whose loss it is; they are those of a lane.

        Returns:
            A mean over these samples, or a `Loss`.
        """
        raise NotImplementedError

    def batch_loss_inputs(self, batch: Any) -> Any:
        """Return what `batch_loss` or `row_loss` needs of a micro-batch besides the outputs: labels or ids.

        Args:
            batch: the collated micro-batch, on the model's device.

        Returns:
            Tensors whose first dimension is the samples, in any nested containers; by default nothing.
        """
        return None

    def before_update(self, model: nn.Module, step: UpdatedStep) -> None:  # noqa: B027 - most have none
        """Change the gradient once in each step that updates, before it is clipped by `train.max_grad_norm`.

        To clip by value or by layer, add noise, project, or log: `parameter.grad` is that of the global
        batch, unscaled in fp16. Called as `after_update` is, with the same arguments; of an optimizer with a
        closure, for each of its gradients. It may write gradients, or give a parameter another one, and
        buffers. Not under the reducer `fsdp`.
        """

    def after_update(self, model: nn.Module, step: UpdatedStep) -> None:  # noqa: B027 - most have none
        """Change the model once in each step that updated it, after the optimizer and its scheduler.

        For state of the whole step: queues, teachers, codebooks, balances (docs/losses.md). Called on every
        process, without gradients, under equal random state; every process must do the same. It may write
        parameters and buffers in place, and nothing else: what it keeps in attributes, no checkpoint has.

        Args:
            model: the module; under `data_parallel` that of the first device, which the others follow.
            step: what the lanes gave in `Loss.gather` and `Loss.total`, of all lanes.
        """

    @classmethod
    def loss_method(cls) -> str:
        """Return which of `loss`, `batch_loss` and `row_loss` the task has.

        Raises:
            TaskError: if it has none or several.
        """
        names = ("loss", "batch_loss", "row_loss")
        own = [name for name in names if getattr(cls, name) is not getattr(Task, name)]
        if len(own) == 1:
            return own[0]
        raise TaskError(
            f"{cls.__name__} must have exactly one of the methods loss(outputs, batch), for the loss of a "
            "micro-batch, and batch_loss(model, outputs, inputs) or row_loss(model, outputs, inputs, rows), "
            f"for a loss that compares all samples of a step: got {' and '.join(own) or 'none of them'}."
        )

    def collate(self, samples: Any) -> Any:
        """Make a micro-batch of samples. Runs where the samples are read, under the lane's random state.

        Args:
            samples: a list of them; of `ParquetDataset` they are `Rows`, whose `columns` are tensors.
        """
        return collate(samples)

    def sample_lengths(self, dataset: Dataset[Any]) -> Sequence[int]:
        """Return the number of tokens of each sample of the training dataset, for `data.order: bucketed`.

        Called once on every rank, which must all return the same numbers; a NumPy array is fine.
        """
        raise TaskError(_lacks(self, "sample_lengths", "bucketed"))

    def sample_weights(self, dataset: Dataset[Any]) -> Sequence[float]:
        """Return a weight for each sample of the training dataset, for `data.order: weighted`.

        Called once on every rank, which must all return the same numbers; a NumPy array is fine. A sample
        of weight 0 never comes.
        """
        raise TaskError(_lacks(self, "sample_weights", "weighted"))

    def parameter_groups(self, model: nn.Module) -> Iterable[Any]:
        """Return what the optimizer gets: named parameters, or groups of them with options of their own."""
        return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]

    def eval_datasets(self) -> Mapping[str, Any]:
        """Return the datasets to evaluate on, by the name under which their metrics are reported.

        Each is map-style, or a stream, whose epoch 0 is read each time.
        """
        return {}

    def eval_forward(self, model: nn.Module, batch: Any) -> Any:
        """Return the model's outputs in an evaluation, and for predictions; by default those of `forward`.

        For a detector that returns boxes there, or a model that generates text. It may call the model as
        often as it likes: under `fsdp` its weights are whole meanwhile on each process.

        Args:
            model: in evaluation mode; called without gradients.
            batch: the collated micro-batch, on the model's device.
        """
        return self.forward(model, batch)

    def eval_loss(self, outputs: Any, batch: Any) -> Loss | torch.Tensor | Sequence[Loss] | None:
        """Return the micro-batch's loss in an evaluation; by default that of `loss`.

        A task that has it is evaluated by it, also where its loss in training is of the whole batch.

        Args:
            outputs: what `eval_forward` returned.
            batch: the collated micro-batch, on the model's device.

        Returns:
            A loss, as `loss` returns it; None: there is none, and the metrics alone are reported.
        """
        return self.loss(outputs, batch)

    def build_metrics(self) -> Mapping[str, "Metric"]:
        """Return new torchmetrics by name. lanewise gives each lane a copy and merges what they counted."""
        return {}

    def update_metrics(self, metrics: Mapping[str, "Metric"], outputs: Any, batch: Any) -> None:
        """Give a micro-batch to the metrics. Called without gradients, with the model in evaluation mode.

        Args:
            metrics: the lane's copy of `build_metrics`.
            outputs: what `eval_forward` returned: by default, what `forward` does.
            batch: the collated micro-batch, on the model's device.
        """
        if metrics:
            raise TaskError(
                f"{type(self).__name__} builds metrics but does not update them: "
                "give it update_metrics, which calls metric.update for each of them."
            )

    def predict(self, outputs: Any, batch: Any) -> Any:
        """Return what `lanewise.predict` gives of a micro-batch: one entry for each sample, in order.

        Called without gradients, with the model in evaluation mode. By default it is the outputs; choose
        where they have parts that are not of a sample each, such as the loss in those of Hugging Face's
        models.

        Args:
            outputs: what `eval_forward` returned: by default, what `forward` does.
            batch: the collated micro-batch, on the model's device.

        Returns:
            A tensor whose first dimension is the samples, or a list with an entry for each sample, such as
            its text; or several of them in nested dicts, lists and tuples.
        """
        return outputs


def _lacks(task: Task, method: str, order: str) -> str:
    name = type(task).__name__
    return (
        f"data.order is {order}, and {name} has no {method}. Give {name} {method}(dataset), or another order."
    )
