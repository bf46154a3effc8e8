"""The log file of a run, and the paths in its record."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny import tiny_config

from softprune.errors import SoftpruneError
from softprune.lab.config.settings import RunConfig
from softprune.lab.runs.folder import RunFolder
from softprune.lab.runs.networks import build_network
from softprune.lab.train.control import Listener, run_log
from softprune.lab.train.run import resume, start

Tiny = Callable[..., RunConfig]


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tiny:
    monkeypatch.chdir(tmp_path)
    return lambda *overrides: tiny_config(tmp_path, "train.epochs=1", *overrides)


def test_a_run_writes_its_stages_epochs_and_errors(tiny: Tiny, tmp_path: Path) -> None:
    class Fail(Listener):
        def on_step(self, done: int) -> None:
            raise SoftpruneError("the power failed")

    with pytest.raises(SoftpruneError):
        start(tiny(), tmp_path / "run", listener=Fail())
    resume(tmp_path / "run")
    lines = (tmp_path / "run" / "run.log").read_text().splitlines()
    failed = next(number for number, line in enumerate(lines) if " ERROR " in line)
    assert "ERROR   stopped by an error: the power failed" in lines[failed]
    assert any("epoch 1, lr " in line and "MACs" in line for line in lines[failed:])
    before = (tmp_path / "run" / "run.log").read_bytes()
    resume(tmp_path / "run")  # finished: nothing to do
    assert (tmp_path / "run" / "run.log").read_bytes() == before


def test_a_full_disk_or_a_name_that_is_no_text_hides_no_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(tmp_path)
    folder.log.symlink_to("/dev/full")
    with run_log(folder, Listener()) as logged:
        logged.on_phase("training")
    folder.log.unlink()
    with run_log(folder, Listener()) as logged:
        logged.on_phase("caf\udce9")
    assert "caf\\udce9" in folder.log.read_text()
    assert not capfd.readouterr().err


def test_messages_from_before_the_folder_was_made_come_first(tiny: Tiny, tmp_path: Path) -> None:
    config = tiny()
    state = build_network(config.model.name, 7).state_dict()
    torch.save(state, tmp_path / "seven.pt")
    result = start(tiny("model.weights=seven.pt", "train.epochs=1"), tmp_path / "run").result
    assert result is not None
    assert result.table[0].top1 is None, "what the run began with is not trained to its end"
    first = (tmp_path / "run" / "run.log").read_text().splitlines()[0]
    assert "WARNING softprune: " in first
    assert "a classifier for 7 classes instead of 10: not loaded, and initialised at random: " in first


def test_a_record_has_absolute_paths(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    first = start(tiny(), tmp_path / "first")
    outcome = start(tiny("model.weights=first", "data.dir=~/images"), tmp_path / "second", time_limit=0)
    config = outcome.folder.read_config()
    assert config.model.weights == str(first.folder.path.absolute())
    assert config.data.dir == str(tmp_path / "images")
    resumed = resume(tmp_path / "second", data_dir="moved").result
    assert resumed is not None
    assert resumed.config.data.dir == str(tmp_path / "moved")
