"""Revisions that are timed in turns, with stand-ins for their step_time.py."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu" / "turns.py"
STAND_IN = """
import argparse, itertools, time

def _wait(device):
    pass

def main(arguments):
    options = argparse.Namespace(device="cpu", steps=int(arguments[arguments.index("--steps") + 1]))
    _time_blocks([(time.sleep(SECONDS) for _ in itertools.count())], options)
"""


def test_revisions_take_turns_and_one_that_fails_is_left_out(tmp_path):
    revisions = {"fast": "SECONDS = 0.001", "slow": "SECONDS = 0.02", "broken": "raise SystemExit('does not start')"}
    for name, first_line in revisions.items():
        (tmp_path / name / "benchmarks").mkdir(parents=True)
        (tmp_path / name / "benchmarks" / "step_time.py").write_text(first_line + STAND_IN)
        (tmp_path / name / "REVISION").write_text(f"{name} commit\n")
    out = tmp_path / "turns.json"
    codes = [part for name in revisions for part in ("--code", f"{name}={tmp_path / name}")]
    sizes = ["--models", "net", "--device", "cpu", "--steps", "2", "--rounds", "3", "--copies", "1"]
    subprocess.run([sys.executable, SCRIPT, *codes, *sizes, "--out", out], check=True, timeout=120)
    record = json.loads(out.read_text())
    assert record["revisions"] == {name: f"{name} commit" for name in revisions}
    fast, slow = record["rows"]
    assert [(row["revision"], row["model"], len(row["blocks"])) for row in (fast, slow)] == [
        ("fast", "net", 3),
        ("slow", "net", 3),
    ]
    assert 1 <= fast["ms_per_step"] < 20 <= slow["ms_per_step"] == sorted(slow["blocks"])[1]
