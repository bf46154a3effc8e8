"""Commands in a real terminal of 80 columns: nothing is wider, and the progress bar leaves a clean screen."""

import re
import shutil
from pathlib import Path

import pytest
from terminal import in_terminal, lines_of, screens_of
from tiny import tiny_recipe

ROOT = Path(__file__).parents[2]


def test_train_shows_a_bar_with_its_figures_and_ends_with_the_table(tmp_path: Path) -> None:
    tiny_recipe(tmp_path)
    code, written = in_terminal(tmp_path, "train", "tiny.toml", "--epochs", "4", "--out", "run")
    assert code == 0, written
    lines = lines_of(written)
    assert max(map(len, lines)) <= 80, max(lines, key=len)
    bars = [line for line in lines if "━" in line]
    assert any(re.search(r"epoch \d/4 .*loss [\d.]+  top-1 [\d.]+%.*\d:\d\d", line) for line in bars), bars[-3:]
    assert any(line.startswith("Report: run/report.html") for line in lines)
    assert any(line.split()[:1] == ["compact"] for line in lines)
    assert not any("━" in line for line in screens_of(written)[-1])  # the bar is gone


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
