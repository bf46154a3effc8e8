"""The files of a run's folder, and what is said when one is missing or of another kind."""

import json
from pathlib import Path

import pytest
import torch

from softprune.errors import ConfigError, FileFormatError
from softprune.train.config import RunConfig
from softprune.train.environment import describe_environment
from softprune.train.events import EventWriter
from softprune.train.records import RunFolder, finite


def test_history_replaces_torn_lines(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", RunConfig())
    folder.append_metrics({"epoch": 0, "loss": float("nan")})
    with open(folder.metrics, "a") as file:
        file.write('{"epoch": 1, "lo')
    folder.write_history([{"epoch": 0, "loss": 1.5}])
    folder.append_metrics({"epoch": 1, "loss": 0.5})
    rows = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    assert rows == [{"epoch": 0, "loss": 1.5}, {"epoch": 1, "loss": 0.5}]


def test_json_has_no_nan() -> None:
    assert finite({"a": [float("nan"), 1.0, (float("inf"),)]}) == {"a": [None, 1.0, [None]]}


def test_results_of_another_format_are_refused(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", RunConfig())
    with pytest.raises(ConfigError, match="softprune resume"):
        folder.read_result()
    folder.result.write_text("{")
    with pytest.raises(FileFormatError, match="must be JSON"):
        folder.read_result()
    folder.result.write_text('{"format": 99}')
    with pytest.raises(FileFormatError, match=r"format 1\. Got 99"):
        folder.read_result()


def test_the_environment_is_plain_and_complete() -> None:
    environment = describe_environment(torch.device("cpu"))
    assert json.loads(json.dumps(environment)) == environment
    assert {"python", "torch", "softprune", "device", "platform", "git"} <= environment.keys()
    assert environment["device"].startswith("CPU (")


def test_tensorboard_missing_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r"softprune\[tensorboard\]"):
        EventWriter(tmp_path)
