"""A share of `make fuzz` with a fixed seed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COUNT = 150


@pytest.mark.slow
def test_mutated_inputs_have_no_findings(tmp_path: Path) -> None:
    """`make fuzz` has 10,000 inputs."""
    command = [
        sys.executable, str(ROOT / "benchmarks" / "fuzz.py"), "--count", str(COUNT), "--seed", "1",
        "--state", str(tmp_path), "--record", str(tmp_path / "record.json"),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert " 0 findings" in done.stdout
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["inputs"] == sum(sum(counts.values()) for counts in record["formats"].values()) >= COUNT


def test_every_option_of_every_command_is_tried() -> None:
    from fuzzing.settings import known_options

    import fuzz  # noqa: F401  (registers the commands' modules)
    import softprune.lab.cli.train  # noqa: F401

    assert {"--set", "--dry-run", "--device"} <= set(known_options()["train"])


def test_a_stopped_run_continues_from_its_state_unless_the_code_changed(tmp_path: Path) -> None:
    from fuzzing.worker import Outcome

    from fuzz import _read_state

    path = tmp_path / "state"
    path.write_text('{"revision": "abc"}\n{"format": "recipe", "number": 3, "outcome": "refused"}\n{"format": "rec')
    assert _read_state(path, "abc") == {("recipe", 3): Outcome("refused")}
    with pytest.raises(SystemExit, match=r"is of the revision abc. Got def"):
        _read_state(path, "def")
