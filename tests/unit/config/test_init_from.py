"""The weights with which a run begins, as a configuration names them."""

from pathlib import Path

import pytest

from lanewise.config import InitFromConfig
from lanewise.config.check import read_section
from lanewise.errors import ConfigError


def test_it_may_be_its_path_alone_below_the_folder_of_a_user():
    assert read_section(InitFromConfig, "runs/first") == InitFromConfig(path="runs/first")
    assert InitFromConfig(path="~/first").path == str(Path("~/first").expanduser())


def test_what_stands_for_a_beginning_is_text():
    with pytest.raises(ConfigError, match=r"prefixes must give a text for each text: got \{\"a\": 1\}"):
        InitFromConfig(path="a", prefixes={"a": 1})
