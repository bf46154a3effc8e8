"""Commands in a real terminal of 80 columns: nothing is wider, and the progress bar leaves a clean screen."""

import io
import re
import shutil
from pathlib import Path

import pytest
from rich.console import Console
from terminal import ESCAPE, in_terminal, lines_of, screens_of
from tiny import tiny_recipe

from softprune.lab.cli.app import app
from softprune.lab.cli.output import error_line, print_table

ROOT = Path(__file__).parents[3]


def test_control_characters_are_shown_as_escapes(capsys: pytest.CaptureFixture[str]) -> None:
    error_line("a file called \x1b[31mred\x9b\udcff\n and more")
    print_table(["name"], [["\x1b]0;title\x07"]])
    out, err = capsys.readouterr()
    assert err == "error: a file called \\x1b[31mred\\x9b\\udcff\n and more\n"
    assert out.split() == ["name", "\\x1b]0;title\\x07"]


def test_train_shows_a_bar_with_its_figures_and_ends_with_the_table(tmp_path: Path) -> None:
    tiny_recipe(tmp_path)
    code, written = in_terminal(tmp_path, "train", "tiny.toml", "--epochs", "4", "--out", "run")
    assert code == 0, written
    lines = lines_of(written)
    assert max(map(len, lines)) <= 80, max(lines, key=len)
    bars = [line for line in lines if "━" in line]
    assert any(
        re.search(r"epoch \d/4 .*loss [\d.]+  (penalty -?[\d.]+  )?top-1 [\d.]+%.*\d:\d\d", line) for line in bars
    ), bars[-3:]
    assert any(line.startswith("Report: run/report.html") for line in lines)
    assert any(line.split()[:1] == ["compact"] for line in lines)
    assert not any("━" in line for line in screens_of(written)[-1])  # the bar is gone


def test_lists_and_tables_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "results" / "cifar10-vgg16-scp-s0", tmp_path / "runs" / "vgg16")
    shutil.copytree(ROOT / "results" / "cifar10-resnet56-scp-s0", tmp_path / "runs" / "resnet56")
    for command, text in (
        (("compare", "runs"), "Not shown at this width: minutes"),
        (("recipes",), "cifar10-vgg16-scp"),
        (("methods",), "scp"),
    ):
        screen = Console(file=io.StringIO(), force_terminal=True, width=80, color_system=None, highlight=False)
        monkeypatch.setattr("softprune.lab.cli.output._out", screen)
        assert not app([*command], standalone_mode=False)
        lines = ESCAPE.sub("", screen.file.getvalue()).splitlines()
        assert any(text in line for line in lines), lines
        assert max(map(len, lines)) <= 80, max(lines, key=len)
