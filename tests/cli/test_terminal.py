"""Commands in a real terminal of 80 columns: nothing is wider, and the progress bar leaves a clean screen."""

import fcntl
import os
import pty
import re
import select
import shutil
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from tiny import tiny_recipe

ROOT = Path(__file__).parents[2]
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def in_terminal(folder: Path, *arguments: str, columns: int = 80) -> tuple[int, str]:
    """Run a command in a pseudo-terminal and return its exit code and everything that it wrote."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "src"),
        "OMP_NUM_THREADS": "1",
        "TERM": "xterm-256color",
    }
    for name in ("COLUMNS", "LINES", "NO_COLOR"):
        environment.pop(name, None)
    process = subprocess.Popen(
        [sys.executable, "-m", "softprune", *arguments],
        cwd=folder,
        env=environment,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    written, deadline = b"", time.monotonic() + 300
    while time.monotonic() < deadline:
        if select.select([ours], [], [], 1.0)[0]:
            try:
                part = os.read(ours, 65536)
            except OSError:  # the other side has closed
                break
            if not part:
                break
            written += part
    os.close(ours)
    return process.wait(timeout=60), written.decode()


def lines_of(written: str) -> list[str]:
    """Every line that was on the screen at some time, without escape sequences."""
    return [line.rstrip() for line in re.split(r"[\r\n]+", ESCAPE.sub("", written))]


def test_train_shows_a_bar_with_its_figures_and_ends_with_the_table(tmp_path: Path) -> None:
    tiny_recipe(tmp_path)
    code, written = in_terminal(tmp_path, "train", "tiny.toml", "--epochs", "4", "--out", "run")
    assert code == 0, written
    lines = lines_of(written)
    assert max(map(len, lines)) <= 80, max(lines, key=len)
    bars = [line for line in lines if "━" in line]
    assert any(re.search(r"epoch \d/4 .*loss [\d.]+  top-1 [\d.]+%.*\d:\d\d", line) for line in bars), bars[
        -3:
    ]
    assert any(line.startswith("Report: run/report.html") for line in lines)
    assert any(line.split()[:1] == ["compact"] for line in lines)


def test_lists_and_tables_fit(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "results" / "cifar10-vgg16-scp-s0", tmp_path / "runs" / "vgg16")
    shutil.copytree(ROOT / "results" / "cifar10-resnet56-scp-s0", tmp_path / "runs" / "resnet56")
    for command, text in (
        (("runs",), "finished"),
        (("compare", "runs"), "VGG-16"),
        (("recipes",), "cifar10-vgg16-scp"),
        (("methods",), "scp"),
    ):
        code, written = in_terminal(tmp_path, *command)
        assert code == 0, written
        lines = lines_of(written)
        assert any(text in line for line in lines), written
        assert max(map(len, lines)) <= 80, max(lines, key=len)


@pytest.mark.parametrize("command", ["", "train", "sweep", "compare", "bench"])
def test_help_fits(tmp_path: Path, command: str) -> None:
    code, written = in_terminal(tmp_path, *command.split(), "--help")
    assert code == 0
    assert max(map(len, lines_of(written))) <= 80
