"""A share of `make fuzz` with a fixed seed, in two tests so that two workers share it."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_HALVES = (
    ("recipe", "settings", "sweep", "result", "metrics", "config"),
    ("sessions", "checkpoint", "compact", "weights", "cifar", "images", "options"),
)


@pytest.mark.slow
@pytest.mark.parametrize(("formats", "count"), [(_HALVES[0], 250), (_HALVES[1], 120)])
def test_mutated_inputs_have_no_findings(formats: tuple[str, ...], count: int, tmp_path: Path) -> None:
    command = [
        sys.executable, str(ROOT / "benchmarks" / "fuzz.py"), "--count", str(count),
        "--formats", ",".join(formats), "--state", str(tmp_path), "--record", str(tmp_path / "record.json"),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert " 0 findings" in done.stdout


def test_every_format_is_in_one_half() -> None:
    from fuzz import FORMATS

    assert sorted(_HALVES[0] + _HALVES[1]) == sorted(FORMATS)


def test_a_stopped_run_continues_from_its_state(tmp_path: Path) -> None:
    from fuzzing.worker import Outcome

    from fuzz import _read_state

    (tmp_path / "state").write_text(
        '{"format": "recipe", "number": 3, "outcome": "refused"}\n{"format": "rec'
    )
    assert _read_state(tmp_path / "state") == {("recipe", 3): Outcome("refused")}
