"""Kills at file operations and at random times change nothing: the outcome is the same bits. `make kill` has more."""

from pathlib import Path

import killing
import pytest

pytestmark = [
    pytest.mark.filterwarnings("default"),  # of the children, not of this process
    pytest.mark.usefixtures("forking"),
    pytest.mark.slow,
]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder in which the network to save, export and report is trained once."""
    return tmp_path_factory.mktemp("killed")


@pytest.mark.parametrize(("action", "kills"), [("train", 4), ("save", 2), ("export", 1)])
def test_killed_and_repeated(action: str, kills: int, work: Path) -> None:
    tally = killing.kill_and_repeat(action, work, kills=kills)
    assert not tally.findings
    assert tally.kills == kills
    assert tally.compared
