"""TensorBoard's event files, as TensorBoard reads them."""

from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lanewise.errors import StorageError
from lanewise.runs.loggers.tensorboard import TensorBoardLogger
from lanewise.runs.media import Media, to_png


def scalars_of(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(folder)).Reload()
    return {
        name: [(event.step, event.value) for event in events.Scalars(name)]
        for name in events.Tags()["scalars"]
    }


def test_every_metric_is_a_scalar_at_its_step(tmp_path):
    folder = tmp_path / "tensorboard"
    logger = TensorBoardLogger(folder)
    logger.on_step(0, 0, {"train/loss": 2.5, "time/data_seconds": 0.25})
    logger.on_step(1, 7, {"train/loss": 0.125, "time/data_seconds": 0.5})
    logger.on_evaluation(1, 7, {"test/accuracy": 0.75})
    logger.on_end(None)
    assert scalars_of(folder) == {
        "train/loss": [(0, 2.5), (7, 0.125)],
        "time/data_seconds": [(0, 0.25), (7, 0.5)],
        "test/accuracy": [(7, 0.75)],
    }


def test_texts_and_images_stand_at_their_step(tmp_path):
    logger = TensorBoardLogger(tmp_path)
    logger.on_media(0, 0, Media("sample", text="one\n\n  # two"))
    logger.on_media(1, 3, Media("digit", png=to_png(np.zeros((2, 5)))))
    logger.on_end(None)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert events.SummaryMetadata("sample").plugin_data.plugin_name == "text"
    (text,) = events.Tensors("sample")
    assert (text.step, text.tensor_proto.string_val) == (0, [b"    one\n    \n      # two"])
    (image,) = events.Images("digit")
    assert (image.step, image.width, image.height) == (3, 5, 2)
    assert image.encoded_image_string.startswith(b"\x89PNG")


@pytest.mark.parametrize("value", [float("inf"), float("-inf")])
def test_an_infinite_number_stays_one(tmp_path, value):
    logger = TensorBoardLogger(tmp_path)
    logger.on_step(0, 3, {"train/grad_norm": value})
    logger.on_end(None)
    assert scalars_of(tmp_path) == {"train/grad_norm": [(3, value)]}


def test_an_error_keeps_what_was_written(tmp_path):
    logger = TensorBoardLogger(tmp_path)
    logger.on_step(0, 0, {"train/loss": 1.0})
    logger.on_end(RuntimeError())
    assert scalars_of(tmp_path) == {"train/loss": [(0, 1.0)]}


def test_a_run_that_fails_before_its_first_step_leaves_nothing(tmp_path):
    logger = TensorBoardLogger(tmp_path / "tensorboard")
    logger.on_end(RuntimeError())
    assert list(tmp_path.iterdir()) == []


def test_a_killed_run_leaves_its_lines(tmp_path):
    logger = TensorBoardLogger(tmp_path)
    logger.on_step(0, 0, {"train/loss": 1.0})
    left = scalars_of(tmp_path)
    logger.on_end(None)
    assert left == {"train/loss": [(0, 1.0)]}


def test_a_run_that_goes_on_writes_steps_again_and_tensorboard_forgets_the_first_time(tmp_path):
    earlier, later = TensorBoardLogger(tmp_path), TensorBoardLogger(tmp_path, after_step=2)
    for step in range(5):
        earlier.on_step(0, step, {"train/loss": float(step)})
    later.on_step(0, 3, {"train/loss": 30.0})
    for logger in (earlier, later):
        logger.on_end(None)
    assert scalars_of(tmp_path) == {"train/loss": [(0, 0.0), (1, 1.0), (2, 2.0), (3, 30.0)]}


def test_a_folder_that_cannot_be_made_is_one_clear_error(tmp_path):
    (tmp_path / "tensorboard").write_text("a file is in the way")
    with pytest.raises(StorageError, match="tensorboard cannot be written: File exists"):
        TensorBoardLogger(tmp_path / "tensorboard").on_step(0, 0, {"train/loss": 1.0})
