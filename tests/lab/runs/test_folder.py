"""The files of a run's folder, and what is said when one is missing or of another kind."""

import os
from pathlib import Path

import pytest

from softprune.errors import CheckpointError, ConfigError
from softprune.lab.config.settings import DataConfig, ModelConfig, RunConfig
from softprune.lab.runs.folder import RunFolder


def test_the_command_that_resumes_names_the_code_of_ones_own(tmp_path: Path) -> None:
    own = RunConfig(model=ModelConfig(name="my_nets:net"), data=DataConfig(name="my_data:load"))
    folder = RunFolder.create(tmp_path / "a run", own)
    assert folder.resume_command == f"softprune resume '{folder.path}' --model my_nets:net --data my_data:load"
    with folder.lock(), pytest.raises(CheckpointError, match="--model my_nets:net --data my_data:load"), folder.lock():
        pass
    folder.config.write_text("damaged")
    assert folder.resume_command == f"softprune resume '{folder.path}'"


def test_a_folder_holds_one_run(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "a" / "b" / "run", RunConfig(name="first"))
    with pytest.raises(ConfigError, match="already contains a run"):
        RunFolder.create(folder.path, RunConfig(name="second"))
    with pytest.raises(ConfigError, match="already contains a run"):
        folder.check_new()
    RunFolder(folder.path / "new" / "run").check_new()
    assert folder.read_config().name == "first"
    assert [path.name for path in folder.path.iterdir()] == ["config.toml"]


@pytest.mark.parametrize("where", ["file", "file/run", "file/deep/run", "nowhere"])
def test_no_run_begins_where_a_file_is_in_the_way(tmp_path: Path, where: str) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    with pytest.raises(ConfigError, match="--out"):
        RunFolder.create(tmp_path / where, RunConfig())
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


def test_a_broken_configuration_is_named_once_with_a_way_out(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", RunConfig())
    for broken in ("name = [", "[train]\nepochs = -1"):
        folder.config.write_text(broken)
        with pytest.raises(ConfigError, match="Restore the file") as caught:
            folder.read_config()
        assert str(caught.value).count(str(folder.config)) == 1
