"""Kill training, fine-tuning, save, export and report with SIGKILL, repeat them, and compare bit for bit.

    python benchmarks/kill.py [--kills 200] [--seed 0] [--actions train,save] [--set train.deterministic=true ...]

Points are before, after and within every kind of file operation, and random times. What a killed action leaves must be
complete, and what it ends with must be the bits of an undisturbed one. Anything else is a finding, and the exit code
is 1. Writes benchmarks/records/kill.json.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

from revision import revision

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "src"), str(HERE.parent / "tests" / "support")]
# The fork server, and its children, import from here too.
os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])
os.environ.setdefault("OMP_NUM_THREADS", "1")

SHARES = {"train": 0.4, "finetune": 0.24, "save": 0.12, "export": 0.12, "report": 0.12}


def main() -> None:
    """Kill, compare, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--actions", default=",".join(SHARES))
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE")
    parser.add_argument("--record", type=Path, default=HERE / "records" / "kill.json")
    options = parser.parse_args()

    from killing import kill_and_repeat

    from softprune.lab.runs.environment import describe_environment
    from softprune.lab.world import pick_device

    names, began, rows = options.actions.split(","), time.monotonic(), {}
    whole = sum(SHARES[name] for name in names)
    for name in names:
        kills = max(round(options.kills * SHARES[name] / whole), 1)
        with tempfile.TemporaryDirectory() as folder:
            tally = kill_and_repeat(name, Path(folder), kills, options.seed, tuple(options.overrides))
        rows[name] = {
            "kills": tally.kills,
            "half_written": tally.half_written,
            "compared": tally.compared,
            "findings": tally.findings,
            "points": dict(sorted(tally.points.items())),
        }
        print(f"{name}: {tally.kills} kills, {tally.compared} comparisons", *tally.findings, sep="\n  ", flush=True)
    findings = sum(len(row["findings"]) for row in rows.values())
    record = {
        "what": "kills by SIGKILL; each action was repeated and compared with an undisturbed one",
        "command": " ".join(["python", "benchmarks/kill.py", *sys.argv[1:]]),
        "kills": sum(row["kills"] for row in rows.values()),
        "findings": findings,
        "actions": rows,
        "seed": options.seed,
        "revision": revision("src", "benchmarks", "tests/support"),
        "seconds": round(time.monotonic() - began, 1),
        "environment": describe_environment(pick_device()).model_dump(),
    }
    options.record.write_text(json.dumps(record, indent=1) + "\n")
    sys.exit(findings > 0)


if __name__ == "__main__":
    main()
