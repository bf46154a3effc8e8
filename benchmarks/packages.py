"""softprune on real networks of other packages: exact, refused with a reason, or failed.

    python benchmarks/packages.py                # all networks; resumes; writes benchmarks/records/packages.json
    python benchmarks/packages.py --only 'dia*'  # these again

`make packages` installs the packages into an environment of their own. Every network has random weights and is treated
as in the zoo: a few training steps, half of the channels cut at random, masked and compact compared in float64. Of
some networks a share of the MACs is asked for as well.
"""

from __future__ import annotations

import argparse
import fnmatch
import functools
import json
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from package_networks import entries, targets
from vision import declare_operators
from zoo_networks import Entry
from zoo_row import examine, train

import softprune
from softprune.budget.limit import CLOSE
from softprune.errors import ConfigError
from zoo import in_own_process, line

RECORD = Path(__file__).parent / "records" / "packages.json"
SOURCES = ("pytorchcv", "segmentation_models_pytorch", "monai", "ultralytics", "transformers", "speechbrain")
CUT = "default"
"""The setting of rows with a random cut of the default kinds of sites; the others have a target."""
STEPS = 30
"""Training steps towards a target."""
FAILED = ("failed", "crash", "over the limit", "far under the limit")


def ask_for(entry: Entry, share: float) -> dict[str, Any]:
    """Return whether a share of the MACs is met after a short training, or refused before it."""
    torch.manual_seed(0)
    model, example = entry.build(), entry.example()
    row = {"name": entry.name, "source": entry.source, "asked": share, "seconds": {}}
    try:
        pruner = softprune.SoftPruner(model, example, target={"macs": share}, total_steps=STEPS)
    except ConfigError as error:
        return row | {"status": "refused", "reason": str(error)}
    train(model, pruner, example, STEPS)
    pruner.decide()
    status = pruner.status
    assert status is not None
    macs = softprune.cost(pruner.compact(), example[:1]).macs
    state = "met" if macs <= status.limit else "over the limit"
    if macs < (1 - CLOSE) * status.limit:
        state = "far under the limit"
    return row | {"status": state, "kept": macs / status.dense}


def jobs() -> Iterator[tuple[Entry, str, Callable[[Entry], dict[str, Any]]]]:
    """Yield every network with what is done to it: the name of the setting, and the job."""
    for entry in entries():
        yield entry, CUT, examine
    for entry, share in targets():
        yield entry, f"target {share}", functools.partial(ask_for, share=share)


def _versions() -> dict[str, str]:
    found = {"torch": torch.__version__}
    for name in SOURCES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def main(arguments: list[str] | None = None) -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="GLOB", help="these networks again, by name")
    parser.add_argument("--out", type=Path, default=RECORD)
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one network")
    options = parser.parse_args(arguments)
    rows: dict[tuple[str, str, str], dict[str, Any]] = {}
    if options.out.exists():
        before = json.loads(options.out.read_text())["rows"]
        rows = {(row["source"], row["name"], row["setting"]): row for row in before}
    declare_operators()
    order = [(entry.source, entry.name, setting) for entry, setting, _ in jobs()]
    for entry, setting, job in jobs():
        key = (entry.source, entry.name, setting)
        asked = any(fnmatch.fnmatchcase(entry.name, glob) for glob in options.only)
        if not asked and (options.only or rows.get(key, {}).get("status", "crash") not in FAILED):
            continue
        rows[key] = {"setting": setting} | in_own_process(entry, job, options.timeout)
        print(f"{setting:10} {_line(rows[key])}", flush=True)
        head = json.dumps({"command": "make packages", "versions": _versions()})[:-1]
        lines = ",\n".join(json.dumps(rows[key]) for key in order if key in rows)
        options.out.write_text(f'{head}, "rows": [\n{lines}\n]}}\n')


def _line(row: dict[str, Any]) -> str:
    """Return a row in one line."""
    if "kept" in row:
        return f"{row['name']:32} {row['status']} kept {row['kept']:.4f}"
    return line(row)


if __name__ == "__main__":
    main()
