"""Trains what a Trainer of transformers holds, with the same model on any number of devices."""

from importlib.util import find_spec

from lanewise.errors import ConfigError

if find_spec("transformers") is None:
    raise ConfigError(
        "lanewise.hugging_face needs the package transformers, which is not installed. "
        "Run: pip install 'lanewise[huggingface]'."
    )

from lanewise.hugging_face.trainer import read as read
from lanewise.hugging_face.trainer import train as train
