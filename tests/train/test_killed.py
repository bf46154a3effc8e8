"""Kills at file operations and at random times change nothing: the outcome is the same bits. `make kill` has more."""

from pathlib import Path

import killing
import pytest

pytestmark = [
    pytest.mark.filterwarnings("default"),  # of the children, not of this process
    pytest.mark.usefixtures("forking"),
    pytest.mark.slow,
]


def test_ten_kills_of_a_training(tmp_path: Path) -> None:
    tally = killing.kill_and_repeat("train", tmp_path, kills=10)
    assert not tally.findings
    assert tally.kills == 10
    assert tally.half_written >= 1


@pytest.mark.parametrize(("action", "kills"), [("save", 6), ("export", 2), ("report", 3)])
def test_kills_of_a_single_file(action: str, kills: int, tmp_path: Path) -> None:
    tally = killing.kill_and_repeat(action, tmp_path, kills=kills)
    assert not tally.findings
    assert tally.kills == kills
