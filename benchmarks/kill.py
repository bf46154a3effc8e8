"""Kill training, fine-tuning, save, export and report with SIGKILL, repeat them, and compare bit for bit.

    python benchmarks/kill.py [--kills 200] [--seed 0] [--actions train,save] [--set train.deterministic=true ...]

Points are before, after and within every kind of file operation, and random times. What a killed action leaves must be
complete, and what it ends with must be the bits of an undisturbed one. Anything else is a finding, and the exit code
is 1. Where Ray is not installed its part is left out. The state in build/kill.jsonl lets a stopped run of the same
commit continue. Writes benchmarks/records/kill.json.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from revision import revision

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "src"), str(HERE.parent / "tests" / "support")]
# The fork server, and its children, import from here too.
os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])
os.environ.setdefault("OMP_NUM_THREADS", "1")

SHARES = {"train": 0.4, "finetune": 0.24, "save": 0.12, "export": 0.12, "report": 0.12}
_PART = 14


def main() -> None:
    """Kill, compare, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--actions", default=",".join(SHARES))
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE")
    parser.add_argument("--seconds", type=float, default=0, help="stop after this time; the same command continues")
    parser.add_argument("--state", type=Path, default=HERE.parent / "build" / "kill.jsonl")
    parser.add_argument("--record", type=Path, default=HERE / "records" / "kill.json")
    options = parser.parse_args()

    from killing import kill_and_repeat

    from softprune.distributed import pick_device
    from softprune.lab.runs.environment import describe_environment

    names = options.actions.split(",")
    began, code = time.monotonic(), revision("src", "benchmarks", "tests/support")
    done = _read_state(options.state, code)
    for name, part, kills in (parts := _parts(names, options.kills)):
        if f"{name}/{part}" in done:
            continue
        if options.seconds and time.monotonic() - began > options.seconds:
            print(f"Stopped after {options.seconds:g} s: {len(done)} of {len(parts)} parts are done.")
            sys.exit(75)
        started, seed = time.monotonic(), 1000 * options.seed + part
        with tempfile.TemporaryDirectory() as folder:
            tally = kill_and_repeat(name, Path(folder), kills, seed, tuple(options.overrides))
        row = done[f"{name}/{part}"] = {
            "kills": tally.kills,
            "half_written": tally.half_written,
            "compared": tally.compared,
            "findings": tally.findings,
            "points": dict(tally.points),
            "seconds": round(time.monotonic() - started, 1),
        }
        with open(options.state, "a", encoding="utf-8") as state:
            state.write(json.dumps({"part": f"{name}/{part}", **row}) + "\n")
        print(
            f"{name}: {tally.kills} kills, {tally.compared} comparisons, {len(tally.findings)} findings, "
            f"{row['seconds']:.0f} s",
            *tally.findings,
            sep="\n  ",
            flush=True,
        )
    rows = {name: _merged([done[f"{name}/{part}"] for each, part, _ in parts if each == name]) for name in names}
    points: Counter[str] = Counter()
    for row in rows.values():
        points.update(row["points"])
    findings = sum(len(row["findings"]) for row in rows.values())
    record = {
        "what": "kills by SIGKILL; each action was repeated and compared with an undisturbed one",
        "command": " ".join(["python", "benchmarks/kill.py", *sys.argv[1:]]),
        "kills": sum(points.values()),
        "findings": findings,
        "actions": rows,
        "points": dict(sorted(points.items())),
        "overrides": options.overrides,
        "seed": options.seed,
        "revision": code,
        "seconds": round(sum(row["seconds"] for row in done.values()), 1),
        "environment": describe_environment(pick_device()).model_dump(),
    }
    options.record.parent.mkdir(parents=True, exist_ok=True)
    options.record.write_text(json.dumps(record, indent=1) + "\n")
    sys.exit(findings > 0)


def _parts(names: list[str], kills: int) -> list[tuple[str, int, int]]:
    """Return (action, number, kills) of parts of a few minutes, between which a run can be stopped."""
    whole, parts = sum(SHARES[name] for name in names), []
    for name in names:
        left, number = max(round(kills * SHARES[name] / whole), 1), 0
        while left:
            parts.append((name, number, min(left, _PART)))
            left, number = left - parts[-1][2], number + 1
    return parts


def _merged(rows: list[dict[str, Any]]) -> dict[str, Any]:
    points: Counter[str] = Counter()
    for row in rows:
        points.update(row["points"])
    sums = {key: sum(row[key] for row in rows) for key in ("kills", "half_written", "compared")}
    findings = [finding for row in rows for finding in row["findings"]]
    return {**sums, "findings": findings, "points": dict(sorted(points.items()))}


def _read_state(path: Path, code: str) -> dict[str, dict[str, Any]]:
    """Return the parts that are done. A state of other code is refused: a record is of one commit."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_file():
        path.write_text(json.dumps({"revision": code}) + "\n", encoding="utf-8")
    first, *lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    if first["revision"] != code:
        raise SystemExit(f"{path} is of the revision {first['revision']}. Got {code}; remove it to begin again.")
    return {line.pop("part"): line for line in lines}


if __name__ == "__main__":
    main()
