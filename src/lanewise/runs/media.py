"""Texts and images that callbacks log, and how an image becomes a PNG file."""

from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np

from lanewise.errors import TaskError


@dataclass(frozen=True)
class Media:
    """A text, or an image as a PNG file."""

    name: str
    text: str | None = None
    png: bytes | None = None


def to_png(image: Any) -> bytes:
    """Encode an image as PNG.

    Args:
        image: a tensor, an array or an image of PIL: [height, width], or with 1, 3 or 4 channels as the first
            or the last dimension; floats from 0 to 1, or integers from 0 to 255.

    Raises:
        TaskError: if it has another shape.
    """
    from PIL import Image  # noqa: PLC0415 - most runs draw nothing

    if hasattr(image, "detach"):  # a tensor; numpy has no bfloat16
        image = (image.detach().float() if image.is_floating_point() else image.detach()).cpu()
    values = np.asarray(image)
    if values.dtype.kind in "fb":
        values = np.nan_to_num(np.clip(values, 0, 1)) * 255
    if values.ndim == 3 and values.shape[0] in (1, 3, 4):
        values = np.moveaxis(values, 0, -1)
    values = values[..., 0] if values.shape[2:] == (1,) else values
    if values.ndim != 2 and values.shape[2:] not in ((3,), (4,)):
        raise TaskError(
            f"an image has the shape {tuple(np.shape(image))}: need [height, width], or [channels, height, "
            "width] or [height, width, channels] with 1, 3 or 4 channels. Log one image at a time."
        )
    file = BytesIO()
    Image.fromarray(np.rint(values).astype(np.uint8)).save(file, "png")
    return file.getvalue()
