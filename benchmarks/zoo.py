"""The zoo: softprune on networks of torchvision and timm.

    python benchmarks/zoo.py                     run all networks, record benchmarks/records/zoo.json
    python benchmarks/zoo.py --only resnet18 'efficientnet*'
    python benchmarks/zoo.py --render            write benchmarks/records/zoo.md from the record

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
from zoo_row import examine
from zoo_table import render

from softprune.runs.environment import describe_environment

ROOT = Path(__file__).parent
RECORD = ROOT / "records" / "zoo.json"
DOCUMENT = ROOT / "records" / "zoo.md"


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run what the command line asks for and return the record."""
    options = _parser().parse_args(arguments)
    if options.render:
        record = json.loads(options.out.read_text(encoding="utf-8"))
        options.document.write_text(render(record), encoding="utf-8")
        return record
    chosen = [
        entry
        for entry in entries()
        if not options.only or any(fnmatch.fnmatchcase(entry.name, glob) for glob in options.only)
    ]
    before = json.loads(options.out.read_text(encoding="utf-8"))["rows"] if options.out.exists() else []
    rows = {(row["source"], row["name"]): row for row in before}
    order = [(entry.source, entry.name) for entry in entries()]
    for entry in chosen:
        key = (entry.source, entry.name)
        if options.resume and rows.get(key, {}).get("status") in ("exact", "refused"):
            continue
        rows[key] = row = in_own_process(entry, functools.partial(examine, steps=options.steps), options.timeout)
        print(line(row), flush=True)
        record = {
            "format": 1,
            "what": "softprune on networks of torchvision and timm, random weights, half of the channels cut at random",
            "command": "python benchmarks/zoo.py",
            "environment": describe_environment(torch.device("cpu")).model_dump() | _versions(),
            "rows": [rows[key] for key in order if key in rows],
        }
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return json.loads(options.out.read_text(encoding="utf-8"))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="GLOB", help="these networks, by name")
    parser.add_argument("--out", type=Path, default=RECORD, help="the record; rows that are run again are replaced")
    parser.add_argument("--resume", action="store_true", help="skip rows that the record has already")
    parser.add_argument("--steps", type=int, default=2, help="training steps before the cut")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for one network")
    parser.add_argument("--render", action="store_true", help="only write the document from the record")
    parser.add_argument("--document", type=Path, default=DOCUMENT)
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
        f"{row['name']:32} {row['status']:10} {seconds:6.1f} s  sites {row['sites']:4} frozen {frozen:3} "
        f"reachable {row['macs_reachable']:.3f} kept {row['macs_kept']:.3f} "
        f"diff {row['difference']:.1e}/{row['scale']:.1e}"
        f"{'' if row['predicted'] else '  MACs or params mispredicted'}"
        f"{'' if row.get('loss_is_finite', True) else '  loss not finite'}"
    )


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in ("torchvision", "timm")}


if __name__ == "__main__":
    main()
