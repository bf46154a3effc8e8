"""kill -9 at ten random moments, half of them while a checkpoint is written: the outcome is the same bits."""

import os
from pathlib import Path

import killing
import pytest
from tiny import tiny_recipe


@pytest.mark.filterwarnings("default")  # of the children, not of this process
def test_ten_kills_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    # The server imports what its children need once; it looks for it where PYTHONPATH says.
    here = Path(__file__).parent
    monkeypatch.setenv("PYTHONPATH", f"{here.parents[1] / 'src'}{os.pathsep}{here}")
    tiny_recipe(tmp_path)
    counts = killing.kill_and_resume(tmp_path, kills=10)
    assert counts["kills"] == 10
    assert counts["torn"] >= 3
