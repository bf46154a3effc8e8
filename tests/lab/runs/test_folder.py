"""The files of a run's folder, and what is said when one is missing or of another kind."""

import os
from pathlib import Path

import pytest
import torch

from softprune.errors import CheckpointError, ConfigError, FileFormatError
from softprune.lab.config.settings import DataConfig, ModelConfig, RunConfig
from softprune.lab.runs.environment import describe_session
from softprune.lab.runs.folder import RunFolder, read_metrics
from softprune.lab.runs.result import Epoch, Session


def row(epoch: int, loss: float) -> Epoch:
    return Epoch(
        epoch=epoch,
        step=3 * (epoch + 1),
        lr=0.1,
        train_loss=loss,
        train_top1=50.0,
        seconds=1.0,
        images_per_second=9.0,
        channels=1,
        params=2,
        macs=3,
    )


def session(command: str) -> Session:
    return describe_session(torch.device("cpu"), 1, epoch=0, batch=0).model_copy(update={"command": command})


def test_history_replaces_incomplete_lines(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", RunConfig())
    folder.append_metrics(row(0, float("nan")))
    with open(folder.metrics, "a") as file:
        file.write('{"epoch": 1, "lo')
    folder.write_history([row(0, 1.5)])
    folder.append_metrics(row(1, 0.5))
    assert read_metrics(folder.metrics) == ((row(0, 1.5), row(1, 0.5)), False)


def test_a_damaged_session_is_left_out_and_spoils_no_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = RunFolder.create(tmp_path / "run", RunConfig())
    first, last = session("softprune train"), session("softprune resume run")
    folder.add_session(first)
    with open(folder.sessions, "a") as file:
        file.write('{"command": "softp')
    assert folder.read_sessions() == [first]
    folder.add_session(last)
    caplog.clear()
    assert folder.read_sessions() == [first, last]
    assert "line 2 must be JSON" in caplog.text
    folder.sessions.write_bytes(b'\0\xff\n[]\n{}\n{"command": "\\u001b"}\n' + b"[" * 100_000 + b"\n")
    assert folder.read_sessions() == []


def test_the_command_that_resumes_names_the_code_of_ones_own(tmp_path: Path) -> None:
    own = RunConfig(model=ModelConfig(name="my_nets:net"), data=DataConfig(name="my_data:load"))
    folder = RunFolder.create(tmp_path / "a run", own)
    baseline = RunFolder.create(folder.dense, own)
    for run in (folder, baseline):
        assert run.resume_command == f"softprune resume '{folder.path}' --model my_nets:net --data my_data:load"
        assert run.again_command == f"softprune train '{folder.config}'"
    with folder.lock(), pytest.raises(CheckpointError, match="--model my_nets:net --data my_data:load"), folder.lock():
        pass
    folder.config.write_text("damaged")
    assert folder.resume_command == f"softprune resume '{folder.path}'"


def test_a_folder_holds_one_run(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "a" / "b" / "run", RunConfig(name="first"))
    with pytest.raises(ConfigError, match="holds a run already"):
        RunFolder.create(folder.path, RunConfig(name="second"))
    with pytest.raises(ConfigError, match="holds a run already"):
        RunFolder.check_new(folder.path)
    RunFolder.check_new(folder.path / "new" / "run")
    assert folder.read_config().name == "first"
    assert [path.name for path in folder.path.iterdir()] == ["config.toml"]


@pytest.mark.parametrize("where", ["file", "file/run", "file/deep/run", "nowhere"])
def test_no_run_begins_where_a_file_is_in_the_way(tmp_path: Path, where: str) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    for begin in (RunFolder.check_new, lambda path: RunFolder.create(path, RunConfig())):
        with pytest.raises(ConfigError, match=rf"{where}: .*/(file|nowhere) is not a folder.*--out") as caught:
            begin(tmp_path / where)
        assert "resume" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "nowhere"]


def test_one_process_works_on_a_run(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", RunConfig())
    with folder.lock():
        with pytest.raises(CheckpointError, match=rf"which process {os.getpid()} on .* is training.* resume"):
            folder.lock().__enter__()
        RunFolder.open(folder.path).read_config()
    with folder.lock():
        pass


def test_the_lock_removes_what_a_killed_process_left(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", RunConfig())
    (folder.path / ".result.json.123.tmp").write_text("half")
    folder.checkpoints.mkdir()
    (folder.checkpoints / ".step-0000000002.ckpt.123.tmp").write_bytes(b"half")
    with folder.lock():
        assert [path.name for path in sorted(folder.path.iterdir())] == [".lock", "checkpoints", "config.toml"]
        assert not list(folder.checkpoints.iterdir())


def test_results_of_another_format_are_refused(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", RunConfig())
    with pytest.raises(ConfigError, match="softprune resume"):
        folder.read_result()
    folder.result.write_text("{")
    with pytest.raises(FileFormatError, match=r"must be JSON.*Delete it, and `softprune resume"):
        folder.read_result()
    folder.result.write_text('{"format": 99}')
    with pytest.raises(FileFormatError, match=r"format 2\. Got 99\. A newer softprune"):
        folder.read_result()


def test_a_broken_configuration_is_named_once_with_a_way_out(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", RunConfig())
    half = folder.config.read_text().partition("[optimizer]")[0]
    for broken in ("name = [", "nothing = 3", "", half):
        folder.config.write_text(broken)
        with pytest.raises(ConfigError, match="Restore the file") as caught:
            folder.read_config()
        assert str(caught.value).count(str(folder.config)) == 1


@pytest.mark.parametrize("path", ["s3://bucket/run", Path("gs://bucket/run")])
def test_a_url_is_not_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: Path | str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"must be on a disk.*Got the URL .*bucket/run; mount it"):
        RunFolder.create(path, RunConfig())
    assert not list(tmp_path.iterdir())
