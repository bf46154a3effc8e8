"""Kill training, fine-tuning, save, export, report and sweep with SIGKILL, repeat them, and compare bit for bit.

    python benchmarks/kill.py [--kills 200] [--seed 0] [--actions train,save] [--set train.deterministic=true ...]

Points are before, after and within every kind of file operation, and random times. What a killed action leaves must be
complete, and what it ends with must be the bits of an undisturbed one. Writes benchmarks/records/kill.json.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "src"), str(HERE.parent / "tests" / "support")]
# The fork server, and its children, import from here too.
os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])
os.environ.setdefault("OMP_NUM_THREADS", "1")

SHARES = {"train": 0.35, "finetune": 0.2, "save": 0.12, "export": 0.1, "report": 0.13, "sweep": 0.1}


def main() -> None:
    """Kill, compare, and write the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--actions", default=",".join(SHARES))
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE")
    parser.add_argument("--record", type=Path, default=HERE / "records" / "kill.json")
    options = parser.parse_args()

    from killing import kill_and_repeat, kill_sweep

    from softprune.distributed import pick_device
    from softprune.runs.environment import describe_environment

    names = options.actions.split(",")
    whole = sum(SHARES[name] for name in names)
    rows, began = {}, time.monotonic()
    for name in names:
        kills = max(round(options.kills * SHARES[name] / whole), 1)
        with tempfile.TemporaryDirectory() as folder:
            if name == "sweep":
                tally = kill_sweep(Path(folder), kills, options.seed)
            else:
                tally = kill_and_repeat(name, Path(folder), kills, options.seed, tuple(options.overrides))
        rows[name] = {
            "kills": tally.kills,
            "half_written": tally.half_written,
            "compared": tally.compared,
            "points": dict(sorted(tally.points.items())),
        }
        print(
            f"{name}: {tally.kills} kills, {tally.compared} comparisons, {time.monotonic() - began:.0f} s",
            flush=True,
        )
    points: Counter[str] = Counter()
    for row in rows.values():
        points.update(row["points"])  # type: ignore[arg-type]
    record = {
        "what": "kills by SIGKILL; each action was repeated and compared with an undisturbed one",
        "kills": sum(points.values()),
        "identical": True,  # a difference raises
        "actions": rows,
        "points": dict(sorted(points.items())),
        "executors": ["local"],
        "overrides": options.overrides,
        "seed": options.seed,
        "seconds": round(time.monotonic() - began, 1),
        "environment": _plain(describe_environment(pick_device())),
    }
    options.record.parent.mkdir(parents=True, exist_ok=True)
    options.record.write_text(json.dumps(record, indent=1) + "\n")


def _plain(environment: object) -> object:
    return environment.model_dump() if hasattr(environment, "model_dump") else environment


if __name__ == "__main__":
    main()
