"""What a record says of the machine, the source and the command."""

import sys

import pytest

from softprune.lab.runs.environment import command_line


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
