"""The zoo: softprune on networks of torchvision and timm.

    python benchmarks/zoo.py                     run all networks, record benchmarks/records/zoo.json
    python benchmarks/zoo.py --only resnet18 'efficientnet*'
    python benchmarks/zoo.py --part 1 2 --out a.json      every second network, beside a process with --part 2 2
    python benchmarks/zoo.py --merge a.json b.json        collect the rows of these records

Every network runs in a process of its own, so that a crash or a lack of memory is a row and not the end.
"""

import argparse
import fnmatch
import functools
import json
import multiprocessing
import multiprocessing.connection
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from zoo_networks import Entry, entries
from zoo_row import examine_both

from softprune.lab.runs.environment import describe_environment

ROOT = Path(__file__).parent
RECORD = ROOT / "records" / "zoo.json"
DONE = ("exact", "not smaller", "refused")


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run what the command line asks for and return the record."""
    options = _parser().parse_args(arguments)
    part, parts = options.part
    chosen = [
        entry
        for entry in entries()[part - 1 :: parts]
        if not options.only or any(fnmatch.fnmatchcase(entry.name, glob) for glob in options.only)
    ]
    before = [json.loads(path.read_text(encoding="utf-8")) for path in (options.out, *options.merge) if path.exists()]
    rows = {  # rows of several commits may come together in one record: each has its own
        (row["source"], row["name"]): {"commit": _commit(record["environment"])} | row
        for record in before
        for row in record["rows"]
    }
    if options.merge:
        return _write(options.out, rows, before[-1]["environment"])
    environment = describe_environment(torch.device("cpu")).model_dump() | _versions()
    for entry in chosen:
        row = rows.get((entry.source, entry.name), {})
        if options.resume and all(each.get("status") in DONE for each in (row, row.get("all_kinds", {}))):
            continue
        row = in_own_process(entry, functools.partial(examine_both, steps=options.steps), options.timeout)
        rows[entry.source, entry.name] = row | {"commit": _commit(environment)}
        print(line(row), flush=True)
        if "all_kinds" in row:
            print(line({"name": "  all kinds"} | row["all_kinds"]), flush=True)
        _write(options.out, rows, environment)
    return json.loads(options.out.read_text(encoding="utf-8"))


def _write(path: Path, rows: dict[tuple[str, str], dict[str, Any]], environment: dict[str, Any]) -> dict[str, Any]:
    order = [(entry.source, entry.name) for entry in entries()]
    record = {
        "format": 2,
        "what": "softprune on networks of torchvision and timm, random weights, half of the channels cut at random",
        "command": "python benchmarks/zoo.py",
        "environment": environment,
        "rows": [rows[key] for key in order if key in rows],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return record


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="GLOB", help="these networks, by name")
    parser.add_argument("--out", type=Path, default=RECORD, help="the record; rows that are run again are replaced")
    parser.add_argument("--resume", action="store_true", help="skip rows that the record has already")
    parser.add_argument("--part", nargs=2, type=int, default=(1, 1), metavar=("I", "N"), help="every Nth, from the Ith")
    parser.add_argument("--merge", nargs="+", default=[], type=Path, help="only collect the rows of these records")
    parser.add_argument("--steps", type=int, default=2, help="training steps before the cut")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for one network")
    return parser


def in_own_process(entry: Entry, job: Callable[[Entry], dict[str, Any]], timeout: float) -> dict[str, Any]:
    """Return the row that `job` makes of a network; a crash, or no row within `timeout` seconds, is a row, too."""
    context = multiprocessing.get_context("fork")  # what is imported here need not be imported again
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(entry, job, sender))
    began = time.perf_counter()
    process.start()
    sender.close()
    try:
        if receiver.poll(timeout):
            return receiver.recv()
        reason = f"no result after {timeout:.0f} seconds"
    except EOFError:
        reason = "the process ended without a result (out of memory?)"
    finally:
        process.kill()
        process.join()
    seconds = {"all": time.perf_counter() - began}
    return {"name": entry.name, "source": entry.source, "status": "crash", "reason": reason, "seconds": seconds}


def _work(entry: Entry, job: Callable[[Entry], dict[str, Any]], sender: multiprocessing.connection.Connection) -> None:
    torch.set_num_threads(1)
    try:
        sender.send(job(entry))
    except BaseException as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        reason = f"{type(error).__name__}: {error} ({Path(last.filename).name}:{last.lineno})"
        sender.send({"name": entry.name, "source": entry.source, "status": "crash", "reason": reason, "seconds": {}})


def line(row: dict[str, Any]) -> str:
    """A row in one line, to watch the run."""
    seconds = row["seconds"].get("all", 0.0)
    if row["status"] not in ("exact", "not smaller"):
        return f"{row['name']:32} {row['status']:10} {seconds:6.1f} s  {row['reason'][:300]}"
    frozen = sum(row["frozen"].values())
    return (
        f"{row['name']:32} {row['status']:10} {seconds:6.1f} s  masked {row['masked']:4} frozen {frozen:3} "
        f"reachable {row['macs_reachable']:.3f} kept {row['macs_kept']:.3f} "
        f"diff {row['difference']:.1e}/{row['scale']:.1e}"
        f"{'' if row['predicted'] else '  MACs or params mispredicted'}"
        f"{'' if row.get('loss_is_finite', True) else '  loss not finite'}"
    )


def _commit(environment: dict[str, Any]) -> str:
    git = environment["git"] or {"commit": "unknown", "changed": False}
    return git["commit"][:12] + ("+" if git["changed"] else "")


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in ("torchvision", "timm")}


if __name__ == "__main__":
    main()
