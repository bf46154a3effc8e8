"""Mutate every kind of file and option that softprune reads, and hold what comes of it against what is documented.

    python benchmarks/fuzz.py [--count 10000] [--seconds S] [--seed 0] [--formats recipe,compact] [--only compact:17]

An input must give the result of the undamaged file, another valid one, or a SoftpruneError (exit code 2), within five
seconds and one gigabyte. Everything else is a finding: saved under build/fuzz/findings, and the exit code is 1. The
state under build/fuzz lets a stopped run of the same commit continue. Writes benchmarks/records/fuzz.json when all
inputs are done.
"""

import argparse
import collections
import contextlib
import gc
import importlib
import json
import math
import os
import platform
import random
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "src"), str(HERE)]

from fuzzing import data_files, network_files, run_files, settings  # noqa: E402, F401  (register their formats)
from fuzzing.formats import FORMATS, command  # noqa: E402
from fuzzing.seeds import Seeds, make_seeds  # noqa: E402
from fuzzing.worker import GOOD, MEMORY, SECONDS, Outcome, Worker  # noqa: E402
from revision import revision  # noqa: E402

RECORD = HERE / "records" / "fuzz.json"


def main() -> None:
    """Handle the inputs that are left, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000, help="inputs over all formats")
    parser.add_argument("--seconds", type=float, default=0, help="stop after this time; the same command continues")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--formats", default=",".join(FORMATS), help="only these, separated by commas")
    parser.add_argument("--only", default="", metavar="FORMAT:NUMBER", help="repeat one input and print its outcome")
    parser.add_argument("--state", type=Path, default=HERE.parent / "build" / "fuzz", help="folder of the state")
    parser.add_argument("--record", type=Path, default=RECORD)
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = str(HERE.parent / "src")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Where an input would use the network it fails at once.
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        os.environ[name] = "http://127.0.0.1:9"
    options.state = options.state.resolve()  # children work elsewhere
    seeds = make_seeds(options.state / "seeds")
    _import_everything(seeds)
    worker = Worker(lambda name, work: _call(name, options.seed, seeds, work))
    if options.only:
        found = worker.handle(options.only, options.state / "findings" / f"{options.seed}-{options.only}")
        worker.close()
        print(json.dumps(asdict(found), indent=1).replace("\\n", "\n"))
        return
    names = options.formats.split(",")
    began, code = time.monotonic(), revision("src", "benchmarks")
    path = options.state / f"state-{options.seed}.jsonl"
    if not path.is_file():
        path.write_text(json.dumps({"revision": code}) + "\n", encoding="utf-8")
    done = _read_state(path, code)
    inputs = _inputs(names, options.count)
    with open(path, "a", encoding="utf-8") as state:
        for name, number in inputs:
            if (name, number) in done:
                continue
            if options.seconds and time.monotonic() - began > options.seconds:
                print(f"Stopped after {options.seconds:g} s: {len(done)} of {len(inputs)} inputs are done.")
                break
            keep = options.state / "findings" / f"{options.seed}-{name}-{number}"
            found = worker.handle(f"{name}:{number}", keep)
            done[name, number] = found
            state.write(json.dumps({"format": name, "number": number, **asdict(found)}) + "\n")
            state.flush()
            if found.outcome not in GOOD:
                print(
                    f"{name}:{number} {found.outcome}: {(found.detail.strip().splitlines() or [''])[-1][:200]}",
                    flush=True,
                )
    worker.close()
    rows = {key: done[key] for key in inputs if key in done}
    findings = sum(found.outcome not in GOOD for found in rows.values())
    print(f"{len(rows):,} inputs, {findings} findings, {time.monotonic() - began:.0f} s")
    if len(rows) == len(inputs):
        _write_record(options.record, rows, options.seed, code)
    sys.exit(findings > 0)


def _import_everything(seeds: Seeds) -> None:
    """Run one command of each kind in this process, so that its children have imported what they need."""
    import torch
    from vision import declare_operators

    from softprune.lab.cli.app import COMMANDS

    torch.set_num_threads(1)
    declare_operators()
    for module in COMMANDS:
        importlib.import_module(f"softprune.lab.cli.{module}")
    with tempfile.TemporaryDirectory() as folder:
        for name in ("recipe.toml", "sweep.toml", "run"):
            seeds.copy(name, Path(folder))
        with contextlib.chdir(folder):
            for arguments in (
                ("sweep", "sweep.toml", "--dry-run"),
                ("report", "run"),
                ("compare", "run", "--out", "table.html"),
                ("runs", "."),
                ("inspect", "run"),
                ("evaluate", "run", "--device", "cpu"),
                ("train", "recipe.toml", "--dry-run"),
            ):
                code, output = command(*arguments)
                assert code == 0, f"`softprune {' '.join(arguments)}` must accept its seed. Got: {output}"
    seeds.checkpoints()
    # A collection in a child would touch, and so copy, every page of this process.
    gc.collect()
    gc.freeze()


def _inputs(names: list[str], count: int) -> list[tuple[str, int]]:
    """Return the inputs, formats in turn."""
    whole = sum(FORMATS[name].share for name in names)
    inputs = [
        ((number + 0.5) / math.ceil(count * FORMATS[name].share / whole), name, number)
        for name in names
        for number in range(math.ceil(count * FORMATS[name].share / whole))
    ]
    return [(name, number) for _, name, number in sorted(inputs)]


def _call(name: str, seed: int, seeds: Seeds, work: Path) -> str:
    """Handle the input ``name``, such as "compact:17", in the folder ``work``."""
    import torch

    torch.set_num_threads(1)  # whatever the input before has set
    kind, _, number = name.partition(":")
    return FORMATS[kind].handle(random.Random(f"{seed}/{kind}/{number}"), seeds, work)


def _read_state(path: Path, code: str) -> dict[tuple[str, int], Outcome]:
    """Return the inputs that are done. A state of other code is refused: a record is of one commit."""
    first, *lines = path.read_text().splitlines()
    then = json.loads(first).get("revision")
    if then != code:
        raise SystemExit(f"{path} is of the revision {then}. Got {code}; remove {path.parent} to begin again.")
    done = {}
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue  # the run was killed while it wrote this line
        key = row.pop("format"), row.pop("number")
        done[key] = Outcome(**row)
    return done


def _write_record(path: Path, rows: dict[tuple[str, int], Outcome], seed: int, code: str) -> None:
    import numpy
    import torch

    from softprune import __version__

    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for (name, _), found in rows.items():
        counts[name][found.outcome] += 1
    record = {
        "what": "mutated inputs by format and outcome",
        "command": f"python benchmarks/fuzz.py --count {len(rows)} --seed {seed}",
        "inputs": len(rows),
        "findings": sum(found.outcome not in GOOD for found in rows.values()),
        "seed": seed,
        "revision": code,
        "formats": {name: dict(sorted(counter.items())) for name, counter in counts.items()},
        "limits": {"seconds": SECONDS, "bytes": MEMORY},
        "longest_seconds": max(found.seconds for found in rows.values()),
        "largest_megabytes": max(found.megabytes for found in rows.values()),
        "processor_seconds": round(sum(found.seconds for found in rows.values()), 1),
        "versions": {
            "softprune": __version__,
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "numpy": numpy.__version__,
        },
        "device": f"CPU, {platform.machine()}, {os.cpu_count()} cores",
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
