"""Images become PNG files, whatever they are given as."""

from io import BytesIO

import numpy as np
import pytest
import torch
from PIL import Image

from lanewise.errors import TaskError
from lanewise.runs.media import to_png

COLORS = torch.arange(2 * 5 * 3, dtype=torch.uint8).reshape(2, 5, 3)
"""Two rows of five pixels."""


def pixels(image: object) -> np.ndarray:
    return np.asarray(Image.open(BytesIO(to_png(image))))


@pytest.mark.parametrize(
    "image",
    [COLORS, COLORS.permute(2, 0, 1), COLORS / 255, COLORS.numpy(), Image.fromarray(COLORS.numpy())],
    ids=["bytes", "channels first", "floats", "numpy", "PIL"],
)
def test_an_image_keeps_its_pixels(image):
    assert pixels(image).tolist() == COLORS.tolist()


@pytest.mark.parametrize("shape", [(2, 5), (1, 2, 5), (2, 5, 1)])
def test_an_image_without_colors_is_gray(shape):
    gray = torch.tensor([[0.0, 0.5, 1.0, 2.0, -1.0], [torch.nan, 1 / 255, 0, 0, 0]]).reshape(shape)
    assert pixels(gray.bfloat16()).tolist() == [[0, 128, 255, 255, 0], [0, 1, 0, 0, 0]]
    assert pixels(torch.ones(2, 5, dtype=torch.bool).reshape(shape)).tolist() == [[255] * 5] * 2


def test_transparency_is_kept():
    assert pixels(torch.zeros(2, 5, 4)).shape == (2, 5, 4)


@pytest.mark.parametrize("shape", [(5,), (8, 3, 2, 5), (2, 5, 7)])
def test_what_is_no_image_is_an_error(shape):
    with pytest.raises(TaskError, match=r"an image has the shape \(.*Log one image at a time"):
        to_png(torch.zeros(shape))
