"""Output that cannot be written: a run continues without it, any other command fails."""

import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import commands
import pytest
from commands import named_pipe
from tiny import metrics, tiny_recipe

from softprune.lab.cli.app import app
from softprune.lab.cli.output import begin_output, error_line, print_table, say

ROOT = Path(__file__).parents[3]
TRAIN = ("train", "tiny.toml", "--device", "cpu", "--out", "run", "--set")

needs_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")


def begin(folder: Path, *arguments: str, **streams: int) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "softprune", *arguments]
    return subprocess.Popen(command, cwd=folder, env=environment, text=True, **streams)


@pytest.mark.filterwarnings("default")  # of the child, not of this process
@pytest.mark.usefixtures("forking")
def test_a_run_continues_when_its_reader_has_gone(tmp_path: Path) -> None:
    tiny_recipe(tmp_path)
    errors = tmp_path / "errors"
    process = commands.begin(tmp_path, *TRAIN, "train.epochs=2", out=named_pipe(tmp_path / "out"), errors=errors)
    with open(tmp_path / "out") as reader:
        reader.readline()
    process.join(120)
    said = errors.read_text()
    assert process.exitcode == 0, said
    assert said.count("cannot write to standard output (Broken pipe); the run continues") == 1
    assert "Traceback" not in said
    assert len(metrics(tmp_path / "run")) == 2
    assert (tmp_path / "run" / "report.html").is_file()


@pytest.mark.filterwarnings("default")
@pytest.mark.usefixtures("forking")
def test_a_run_without_readers_of_both_streams_still_stops_on_a_signal(tmp_path: Path) -> None:
    tiny_recipe(tmp_path)
    process = commands.begin(tmp_path, *TRAIN, "train.epochs=100000", out=named_pipe(tmp_path / "out"))
    with open(tmp_path / "out") as reader:
        while not reader.readline().startswith("epoch 1/"):
            assert process.is_alive()
    os.kill(process.pid, signal.SIGINT)
    process.join(120)
    assert process.exitcode == 75
    assert list((tmp_path / "run" / "checkpoints").glob("*.ckpt"))


@needs_full
def test_a_run_continues_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_recipe(tmp_path)
    monkeypatch.chdir(tmp_path)
    said = io.StringIO()
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        monkeypatch.setattr(sys, "stderr", said)
        code = app([*TRAIN, "train.epochs=1"], standalone_mode=False)
    begin_output()  # of the next test
    assert not code
    assert said.getvalue().count("No space left on device") == 1
    assert (tmp_path / "run" / "result.json").is_file()


def test_a_list_ends_quietly_when_its_reader_has_gone(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    with begin(tmp_path, "recipes", stdout=write, stderr=subprocess.PIPE) as process:
        os.close(write)
        _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (0, "")


@needs_full
def test_a_list_on_a_full_disk_is_one_line_and_an_error(tmp_path: Path) -> None:
    with (
        open("/dev/full", "w") as full,
        begin(tmp_path, "methods", stdout=full.fileno(), stderr=subprocess.PIPE) as process,
    ):
        _, said = process.communicate(timeout=60)
    assert process.returncode == 2
    assert len(said.splitlines()) == 1
    assert "No space left on device" in said


def test_names_between_colons_are_no_emoji(capsys: pytest.CaptureFixture[str]) -> None:
    say("nets:ok:net")
    print_table("", ["run"], [["nets:ok:net"]])
    error_line("nets:ok:net")
    assert "".join(capsys.readouterr()).count("nets:ok:net") == 3


def test_characters_outside_the_encoding_are_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii", write_through=True))
    say("n\xe4me")
    assert written.getvalue() == b"n\\xe4me\n"
