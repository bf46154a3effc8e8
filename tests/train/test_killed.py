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
    assert tally.kills == 10
    assert tally.half_written >= 2


@pytest.mark.parametrize("action", ["save", "export", "report"])
def test_kills_of_a_single_file(action: str, tmp_path: Path) -> None:
    assert killing.kill_and_repeat(action, tmp_path, kills=8).kills == 8
