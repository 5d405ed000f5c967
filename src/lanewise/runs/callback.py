"""The interface of what observes a run: loggers, and the user's own callbacks."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lanewise.config import RunConfig
from lanewise.errors import TaskError
from lanewise.runs.media import Media, to_png

if TYPE_CHECKING:
    from torch import nn

TAKEN_NAMES = frozenset({"loss", "weight", "grad_norm", "learning_rate", "skipped_steps"})
"""What the trainer reports of each step itself, so that no metric of a loss may have such a name."""


@dataclass(frozen=True)
class RunStart:
    """A start of a run."""

    run_dir: Path
    """Where the run writes."""
    run_id: str
    """The same for all starts of the run, as in run.jsonl."""
    config: RunConfig
    """What this start was asked for, with all defaults."""
    first_step: int
    """Greater than 1 where the run goes on from a checkpoint."""
    last_step: int | None
    """The step after which training ends; None where only the data tells, as a stream of some epochs."""


class LargestLoss(NamedTuple):
    """The lane whose loss per unit of weight was the largest in the steps since the line before."""

    loss: float
    """The loss per unit of weight."""
    step: int
    """The step in which it was."""
    lane: int | None
    """None where lanes have no loss of their own, as with `batch_loss`."""
    samples: Sequence[int] = ()
    """The indices of its samples in the dataset; of a stream their numbers in this epoch: of the lane, or of
    all lanes where the stream is plain. With a shuffle buffer they are places in the lane, as trained."""


class Callback:
    """Observes a run on rank 0, and changes nothing; every method is optional.

    Epochs and steps count from 1, over the whole run, as on the console and in metrics.jsonl.

        on_start        before the first step
        on_largest_loss before on_step, where a step had weight
        on_step         after each logged step: the first, the multiples of log.every_steps, and the last
        on_epoch        after the last step of an epoch, or of the run, where the dataset counts what it reads
        on_evaluation   after each evaluation, which follows its step
        on_best         after the best model so far was written, which follows its evaluation
        on_model        when a start begins, after each evaluation or every so many steps, after the last step
        on_digests      with the digests of the state after a step, by integrity.digest_every_steps
        on_media        after a callback logged a text or an image in its on_model
        on_end          after the last step, or after the error that ends the run

    On a GPU the methods are called while the next step is already computed, but for on_model.

    Each of them but on_end may call `stop`.
    """

    model_every_steps: int | None = None
    """Steps from one call of `on_model` to the next; None: it is called after each evaluation."""
    stop_reason: str | None = None
    """Why this callback ends the run; None while it does not."""

    def stop(self, reason: str) -> None:
        """End the run after the next step, alike on any number of devices.

        The model and a checkpoint are written, no further evaluation is made, and the exit code is 0. The run
        can go on with --resume, as if it had not been stopped.

        Args:
            reason: a few words for the console and run.jsonl, such as "the accuracy is above 0.99".
        """
        object.__setattr__(self, "stop_reason", str(reason))  # a frozen dataclass may be a callback

    def on_start(self, start: RunStart) -> None:
        """Take where the run writes, what it was asked for, and which steps it will take."""

    def on_largest_loss(self, epoch: int, step: int, largest: LargestLoss) -> None:
        """Take which lane had the largest loss since the logged step before, and its samples."""

    def on_step(self, epoch: int, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of a logged step, and of those since the one before.

        Names are `group/name` with the unit: `perf/samples_per_second`. docs/files.md lists them.
        """

    def on_epoch(self, epoch: int, step: int, values: Mapping[str, float]) -> None:
        """Take what all processes read from the dataset's files in an epoch, since this start of the run.

        `data/read_bytes` is the number of bytes that were read, `data/total_bytes` the size of the files, and
        `data/skipped_samples` the number of samples that were left out, as they could not be read. A dataset
        of other things has the last one alone, with `data.missing: skip`.
        """

    def on_evaluation(self, epoch: int, step: int, values: Mapping[str, float]) -> None:
        """Take the results of an evaluation after this step, by `set/metric`."""

    def on_best(self, epoch: int, step: int, model_file: Path) -> None:
        """Take the path of the model that is the best so far by `evaluate.best`."""

    def on_model(self, epoch: int, step: int, model: "nn.Module") -> None:
        """Use the model, to generate or to draw; log what it makes by `log_text`, `log_image`, `log_figure`.

        All processes wait for it. It is called under a random state of its own, without gradients, and leaves
        no trace in the run. Under `fsdp` the weights are whole on each process meanwhile.

        Args:
            epoch: the epoch of the last step; 0 before the first one.
            step: the last step; 0 before the first one.
            model: what is evaluated, the average where there is one; in evaluation mode, on the device.
        """

    def on_digests(self, epoch: int, step: int, digests: Mapping[str, str]) -> None:
        """Take a digest of each tensor of the state after this step: 16 hexadecimal digits."""

    def on_media(self, epoch: int, step: int, media: Media) -> None:
        """Take a text or an image that a callback logged."""

    def log_text(self, name: str, text: str) -> None:
        """Log a text, in `on_model`: to TensorBoard, the trackers, media.jsonl and the report."""
        self._log(Media(name, text=text))

    def log_image(self, name: str, image: Any) -> None:
        """Log an image, in `on_model`, likewise.

        Args:
            name: what it is called there.
            image: a tensor, an array or an image of PIL: [height, width], or with 1, 3 or 4 channels as the
                first or the last dimension; floats from 0 to 1, or integers from 0 to 255.
        """
        self._log(Media(name, png=to_png(image)))

    def log_figure(self, name: str, figure: Any) -> None:
        """Log a figure of matplotlib, in `on_model`, likewise."""
        figure.savefig(file := BytesIO(), format="png")
        self._log(Media(name, png=file.getvalue()))

    logged_media: list[Media] | None = None
    """What `on_model` logged so far; None outside of it."""

    def _log(self, media: Media) -> None:
        if self.logged_media is None:
            raise TaskError(f"{type(self).__name__} logs {media.name} outside of on_model. Log it there.")
        self.logged_media.append(media)

    def on_end(self, error: BaseException | None) -> None:
        """Flush and close; `error` is what ended the run early."""


class LineCallback(Callback, ABC):
    """Observes the lines of metrics.jsonl: logged steps, epochs that are counted, and evaluations alike."""

    @abstractmethod
    def on_line(self, epoch: int, step: int, values: Mapping[str, float]) -> None:
        """Take the values of a line, and the step after which it comes."""

    def on_step(self, epoch: int, step: int, metrics: Mapping[str, float]) -> None:
        self.on_line(epoch, step, metrics)

    def on_epoch(self, epoch: int, step: int, values: Mapping[str, float]) -> None:
        self.on_line(epoch, step, values)

    def on_evaluation(self, epoch: int, step: int, values: Mapping[str, float]) -> None:
        self.on_line(epoch, step, values)
