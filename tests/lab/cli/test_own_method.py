"""A method of the user's own, that of docs/own-method.md, by its name `module:Class`."""

import re
from pathlib import Path

import pytest
from tiny import metrics

from softprune.lab.runs.folder import RunFolder

PAGE = Path(__file__).parents[3] / "docs" / "own-method.md"
OWN = ("--model", "tiny_networks:tiny")
METHOD = ("--method", "my_methods:GradientPruner")


@pytest.fixture
def written(softprune, tmp_path: Path):
    block = re.findall(r"^```python\n# my_methods.py\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    (tmp_path / "my_methods.py").write_text(block[0])
    return softprune


def test_it_trains_stops_and_resumes(written, tmp_path: Path) -> None:
    train = ("train", "tiny.toml", *METHOD, "--set", "method.options.decay=0.5", "--epochs", "1")
    whole = written(*train, "--set", "method.target.macs=0.5", "--out", "whole")
    assert whole.exit_code == 0, whole.output
    result = RunFolder("whole").read_result()
    assert result.method == METHOD[1]
    assert result.compact.macs <= 0.5 * result.dense.macs
    stopped = written(*train, "--set", "method.target.macs=0.5", "--out", "run", "--time-limit", "0s")
    assert f"softprune resume run {' '.join(OWN)} {' '.join(METHOD)}" in stopped.output
    refused = written("resume", "run", *OWN, "--method", "my_methods:Other")
    assert "add `--method my_methods" in " ".join(refused.stderr.split())
    resumed = written("resume", "run", *OWN, *METHOD)
    assert resumed.exit_code == 0, resumed.output
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")
    cut = written("compact", "run", *OWN, *METHOD)
    assert cut.exit_code == 0, cut.output
