"""Files of others cannot command the terminal, run code or stop a command: what `make fuzz` looks for, case by case."""

import json
import os
import shutil
from pathlib import Path
from random import Random

import pytest
import torch

from softprune.lab.cli.output import error_line, print_table
from softprune.lab.runs.checkpoint import read_newest, save_checkpoint

OWN = ("--model", "tiny_networks:tiny")


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """Return a copy of a finished run."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def test_control_characters_are_shown_as_escapes(capsys: pytest.CaptureFixture[str]) -> None:
    error_line("a file called \x1b[31mred\x9b\udcff\n and more")
    print_table("", ["name"], [["\x1b]0;title\x07"]])
    out, err = capsys.readouterr()
    assert err == "error: a file called \\x1b[31mred\\x9b\\udcff\n and more\n"
    assert out == "name\n\\x1b]0;title\\x07\n"


@pytest.mark.parametrize("line", ["{}", "[]", "1", '{"started": "\\u001b[2J"}', "[" * 100_000, "9" * 5000, '"\\ud800"'])
def test_a_damaged_session_does_not_stop_a_resumed_run(softprune, run: Path, line: str) -> None:
    (run / "result.json").unlink()
    sessions = run / "sessions.jsonl"
    sessions.write_text(sessions.read_text() + line + "\n")
    result = softprune("resume", str(run), *OWN)
    assert result.exit_code == 0, result.output
    assert (run / "result.json").is_file()


@pytest.mark.parametrize("change", [{"format": 99}, {"table": 5}, {"dense": None}, {"name": "\x1b[2J"}, {"extra": 1}])
def test_an_edited_result_is_refused_at_resume(softprune, run: Path, change: dict[str, object]) -> None:
    path = run / "result.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    result = softprune("resume", str(run))
    assert result.exit_code == 2, result.output
    assert "result.json" in result.stderr


def test_a_finished_run_on_a_read_only_disk_is_resumed(softprune, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As root no permission stops a write: the disk is one that refuses every file."""
    opened = os.open

    def read_only(path: object, flags: int, *args: object, **kwargs: object) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) and str(path).startswith(str(run)):
            raise OSError(30, "Read-only file system", path)
        return opened(path, flags, *args, **kwargs)  # type: ignore[arg-type]

    import builtins
    import io

    text = io.open

    def reading(file: object, mode: str = "r", *args: object, **kwargs: object) -> object:
        if set(mode) & set("wax+") and str(file).startswith(str(run)):
            raise OSError(30, "Read-only file system", file)
        return text(file, mode, *args, **kwargs)  # type: ignore[call-overload]

    monkeypatch.setattr(os, "open", read_only)
    monkeypatch.setattr(builtins, "open", reading)
    monkeypatch.setattr(io, "open", reading)
    result = softprune("resume", str(run))
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("seed", range(12))
def test_a_checkpoint_with_other_content_and_a_right_checksum(softprune, run: Path, seed: int) -> None:
    """The state is changed in one place and signed again: it is restored or refused."""
    from fuzzing.network_files import mutate_state

    folder = run / "checkpoints"
    path, state = read_newest(folder)
    (run / "result.json").unlink()
    for each in folder.iterdir():
        each.unlink()
    save_checkpoint(folder, int(path.stem.removeprefix("step-")), mutate_state(Random(seed), state))
    result = softprune("resume", str(run), *OWN)
    assert result.exit_code in (0, 2), result.output


@pytest.mark.parametrize("epoch", [None, {}, "text", 1.5])
def test_a_checkpoint_whose_place_is_no_number(softprune, run: Path, epoch: object) -> None:
    folder = run / "checkpoints"
    path, state = read_newest(folder)
    (run / "result.json").unlink()
    changed = {key: value for key, value in state.items() if key != "epoch"}
    save_checkpoint(
        folder, int(path.stem.removeprefix("step-")), changed if epoch is None else {**changed, "epoch": epoch}
    )
    result = softprune("resume", str(run), *OWN)
    assert result.exit_code == 2, result.output
    assert "A checkpoint must hold what softprune saved" in " ".join(result.stderr.split())


def test_weights_of_another_kind(softprune, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "weights.pt")
    result = softprune("train", "digits", "--dry-run", "--set", "model.weights=weights.pt")
    assert result.exit_code == 2
    assert "which is neither" in result.stderr
    (tmp_path / "weights.pt").unlink()
    from softprune.models import build

    state = build("digits_net", 10).state_dict()
    name = next(iter(state))
    for dtype in (torch.int8, torch.complex64):
        torch.save({**state, name: state[name].to(dtype)}, tmp_path / "weights.pt")
        result = softprune("train", "digits", "--dry-run", "--set", "model.weights=weights.pt")
        assert result.exit_code == 2
        assert "of another dtype" in result.stderr
    torch.save({1: state[name]}, tmp_path / "weights.pt")
    assert "must hold one state_dict" in softprune("train", "--dry-run", "--set", "model.weights=weights.pt").stderr


@pytest.mark.parametrize("shape", ["3x200000x200000", "1x8x" + "9" * 5000, "1x8x²", "1x8x0"])
def test_shapes_beyond_any_image_are_refused(softprune, shape: str) -> None:
    result = softprune("inspect", "digits_net", "--input", shape)
    assert result.exit_code == 2
    assert "--input must" in result.stderr


def test_a_path_that_is_too_long_is_an_error_with_a_remedy(softprune) -> None:
    result = softprune("report", "1" * 5000)
    assert result.exit_code == 2
    assert "Got File name too long" in result.stderr
