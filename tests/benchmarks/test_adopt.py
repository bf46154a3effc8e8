"""A trial becomes the record of a recipe only if it was trained as the recipe says."""

import shutil
from pathlib import Path

import adopt
import pytest
from missing import RESULTS

from softprune.lab.config.recipes import dump_config
from softprune.lab.runs.folder import RunFolder

RECIPE = "cifar100-vgg19-scp"


def _trial(folder: Path, **method: object) -> Path:
    """A copy of the record of the recipe under another name."""
    folder.mkdir(parents=True)
    record = RunFolder(RESULTS / f"{RECIPE}-s0").read_result()
    config = record.config.replace(name="trial", method=record.config.method.replace(**method))
    (folder / "config.toml").write_text(dump_config(config))
    (folder / "result.json").write_text(record.model_copy(update={"name": "trial", "config": config}).to_json())
    return folder


def test_a_trial_takes_the_place_of_the_record(tmp_path: Path) -> None:
    shutil.copytree(RESULTS / f"{RECIPE}-s0", tmp_path / f"{RECIPE}-s0")
    (tmp_path / "search").mkdir()
    trial = _trial(tmp_path / "trial")
    RunFolder(trial).bench.write_text("{}")
    command = RunFolder(trial).read_result().command
    record = RunFolder(adopt.adopt(trial, RECIPE, tmp_path)).read_result()
    assert (record.name, record.config.name, record.command) == (RECIPE, RECIPE, command)
    assert not trial.exists()
    assert RunFolder(tmp_path / f"{RECIPE}-s0").bench.read_text() == "{}"
    (before,) = (tmp_path / "search").iterdir()
    assert before.name.startswith(f"{RECIPE}-strength")


def test_a_trial_with_another_strength_is_refused(tmp_path: Path) -> None:
    trial = _trial(tmp_path / "trial", strength=0.5)
    with pytest.raises(SystemExit, match="must be trained as cifar100-vgg19-scp says"):
        adopt.adopt(trial, RECIPE, tmp_path)
    assert trial.is_dir()
