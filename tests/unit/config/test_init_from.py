"""The weights with which a run begins, as a configuration names them."""

from lanewise.config import InitFromConfig
from lanewise.config.check import read_section


def test_it_may_be_its_path_alone():
    assert read_section(InitFromConfig, "runs/first") == InitFromConfig(path="runs/first")
