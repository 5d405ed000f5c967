"""What --json writes can be read by whatever reads JSON."""

import json
import math
from pathlib import Path

import pytest

from lanewise.cli.result import STDOUT, write_json


@pytest.mark.parametrize("name", ["result.json", str(STDOUT)])
def test_a_number_that_json_lacks_becomes_null(tmp_path, monkeypatch, capsys, name):
    """A replay of a bad sample has a loss of NaN, which jq and JavaScript refused to read."""
    monkeypatch.chdir(tmp_path)
    result = {"loss": math.nan, "alone": [(7, math.inf), (9, 0.5)], "norms": {"weight": -math.inf}}
    write_json(Path(name), result)
    text = capsys.readouterr().out or Path(name).read_text()
    read = json.loads(text, parse_constant=pytest.fail)
    assert read == {"loss": None, "alone": [[7, None], [9, 0.5]], "norms": {"weight": None}}
