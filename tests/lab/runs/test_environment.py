"""What a record says of the machine, the source and the command."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import softprune
from softprune.lab.runs import environment
from softprune.lab.runs.environment import command_line, describe_environment


def test_a_processor_has_the_name_that_the_system_knows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    monkeypatch.setattr(environment, "Path", lambda name: cpuinfo if name == "/proc/cpuinfo" else Path(name))
    monkeypatch.setattr(platform, "processor", lambda: "arm")
    assert describe_environment(torch.device("cpu")).device.startswith("CPU (arm, ")
    cpuinfo.write_text("processor\t: 0\nmodel name\t: Fast: 3000\nmodel name\t: Slow\n")
    assert describe_environment(torch.device("cpu")).device.startswith("CPU (Fast: 3000, ")


def test_the_revision_is_that_of_softprunes_own_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def revision(folder: Path) -> object:
        monkeypatch.setattr(softprune, "__file__", str(folder / "__init__.py"))
        return describe_environment(torch.device("cpu")).git

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert revision(tmp_path) is None, "outside git"
    installed = tmp_path / ".venv" / "site-packages"
    installed.mkdir(parents=True)
    file = tmp_path / "file"
    file.write_text("one")
    git("init", "-q")
    git("add", "file")
    git("-c", "user.name=me", "-c", "user.email=me@here", "commit", "-qm", "first")
    commit = git("rev-parse", "HEAD").strip()
    assert revision(tmp_path) == environment.Revision(commit=commit, changed=False)
    file.write_text("two")
    assert revision(tmp_path) == environment.Revision(commit=commit, changed=True)
    assert revision(installed) is None, "an installed package is not of the checkout around it"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["/a/softprune/__main__.py", "train", "my run.toml"], "softprune train 'my run.toml'"),
        (["/bin/softprune", "train", "a\nb", "\udcff", "\x1b[31m"], r"softprune train 'a\nb' '\udcff' '\x1b[31m'"),
        (["/home/me/loop.py", "--fast"], "loop.py --fast"),
    ],
)
def test_a_command_can_be_pasted(arguments: list[str], line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", arguments)
    assert command_line() == line
