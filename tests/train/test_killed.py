"""kill -9 at ten random moments, half of them while a checkpoint is written: the outcome is the same bits."""

from pathlib import Path

import killing
import pytest
from tiny import tiny_recipe


@pytest.mark.filterwarnings("default")  # of the children, not of this process
@pytest.mark.usefixtures("forking")
def test_ten_kills_change_nothing(tmp_path: Path) -> None:
    tiny_recipe(tmp_path)
    counts = killing.kill_and_resume(tmp_path, kills=10)
    assert counts["kills"] == 10
    assert counts["torn"] >= 3
