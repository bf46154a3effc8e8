"""Keep the record of a finished run under results/, slim, and list it in results/runs.csv.

    python benchmarks/keep.py RUN ... [--network] [--name NAME]

A kept record has what tables and figures need: configuration, environment, cost, final metrics and a line per epoch.
Channels' histories and layers stay in the folder of the run. `--network` keeps the compact network as well
(of a dense run its weights), convolutions and linear layers in float16. Without a RUN the list is written again.
"""

import argparse
import csv
import json
import sys
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from softprune import models
from softprune.cut.saved import DOCUMENT, signed
from softprune.io import write_atomically
from softprune.lab.config.settings import RunConfig
from softprune.lab.runs.folder import RunFolder, load_run
from softprune.lab.runs.result import Result, Run

sys.path.insert(0, str(Path(__file__).parent / "paper"))

from counting import PaperCounter

RESULTS = Path(__file__).parents[1] / "results"
LARGEST = 60_000
"""Bytes of a kept record."""
DROPPED = ("modules",)
EPOCH = (
    *("epoch", "phase", "decided", "step", "lr", "strength", "margin", "channels", "params", "macs"),
    *("train_loss", "train_top1", "test_loss", "test_top1", "test_top5", "seconds", "images_per_second"),
)
"""Kept of an epoch, in this order."""
COLUMNS = (
    *("folder", "name", "recipe", "network", "data", "method", "relu", "strength", "target", "seed", "epochs"),
    *("finetune_epochs", "dense_top1", "masked_top1", "best_top1", "last_top1", "compact_top1"),
    *("macs_cut", "params_cut", "paper_channels_cut", "paper_params_cut", "paper_flops_cut"),
    *("minutes", "dense_ms", "compact_ms", "device", "precision", "commit", "clean", "finished", "note"),
)
"""Accuracies and cuts are in percent. ``paper_*`` is counted as the paper counts, or exactly where it has no rule."""
PAPER_NETWORKS = (
    *("vgg16", "vgg19", "digits_net", "resnet20", "resnet56", "resnet110", "resnet164", "densenet40"),
    *("resnet56_a", "resnet110_a"),
)
"""Those that `paper/counting.py` has a rule for."""


def slim(record: Result) -> dict[str, Any]:
    """Return the content of a kept result.json. It reads back as a `Result`."""
    values = record.model_dump(mode="json", exclude=set(DROPPED))
    values["config"] = _differences(values["config"], RunConfig().model_dump(mode="json"))
    values["epochs"] = [_epoch(row) for row in values["epochs"]]
    return values


def _differences(values: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that differ from the defaults."""
    found = {}
    for key, value in values.items():
        default = defaults.get(key)
        if isinstance(value, dict) and isinstance(default, dict) and default:
            value, default = _differences(value, default), {}
        if value != default:
            found[key] = value
    return found


def _epoch(row: dict[str, Any]) -> dict[str, Any]:
    values = {key: row[key] for key in EPOCH if row[key] is not None and row[key] is not True and row[key] != "train"}
    return {key: float(f"{value:.5g}") if isinstance(value, float) else value for key, value in values.items()}


def text_of(record: Result) -> str:
    """Return a kept result.json: a line per entry, and per epoch and site. A long training keeps every second epoch."""
    values = slim(record)
    while len(text := _lines(values)) > LARGEST:
        values["epochs"] = [*values["epochs"][:-1:2], values["epochs"][-1]]
    return text


def _lines(values: dict[str, Any]) -> str:
    lines = []
    for key, value in values.items():
        if isinstance(value, list):
            rows = ",\n".join(json.dumps(row, separators=(",", ":")) for row in value)
            lines.append(f"{json.dumps(key)}: [\n{rows}\n]")
        else:
            lines.append(f"{json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def halved(content: bytes) -> bytes:
    """Return a safetensors file with its convolutions and linear layers in float16."""
    tensors = {
        name: tensor.half() if tensor.is_floating_point() and tensor.dim() > 1 else tensor
        for name, tensor in safetensors.torch.load(content).items()
    }
    size = int.from_bytes(content[:8], "little")
    metadata = json.loads(content[8 : 8 + size]).get("__metadata__", {})
    if DOCUMENT in metadata:  # a compact network: its plans stay
        return signed(tensors, json.loads(metadata[DOCUMENT]))
    return safetensors.torch.save(tensors, metadata=metadata)


def keep(run: Path, *, name: str = "", network: bool = False, results: Path = RESULTS) -> Path:
    """Write the record of a finished run to results/NAME-sSEED and return that folder."""
    record = RunFolder(run).read_result()
    if name:
        record = record.model_copy(update={"name": name, "config": record.config.replace(name=name)})
    folder = results / f"{record.name}-s{record.seed}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "result.json").write_text(text_of(record), encoding="utf-8")
    if network:
        file = "dense.safetensors" if record.method == "dense" else "compact.safetensors"
        write_atomically(folder / file, halved((run / file).read_bytes()), then="keep the run again")
    return folder


def row_of(run: Run, folder: str) -> dict[str, Any]:
    """Return the row of a run in runs.csv."""
    method, train, git = run.config.method, run.config.train, run.environment and run.environment.git
    words, masked, times = run.command.split(), run.variant("masked"), _latencies(run)
    return {
        "folder": folder,
        "name": run.name,
        "recipe": words[2] if words[:2] == ["softprune", "train"] else "",
        "network": run.model,
        "data": run.data,
        "method": run.method,
        "relu": "yes" if run.config.masks.use_relu else "no",
        "strength": "" if method.target or run.method == "dense" else f"{method.strength:g}",
        "target": " ".join(f"{key}={value:g}" for key, value in method.target.items()),
        "seed": run.seed,
        "epochs": train.epochs,
        "finetune_epochs": run.config.finetune.epochs,
        "dense_top1": _number(run.dense_top1),
        "masked_top1": _number(masked and masked.top1),
        "best_top1": _number(run.best and run.best.top1),
        "last_top1": _number(run.last and run.last.top1),
        "compact_top1": _number(run.compact_top1),
        "macs_cut": _cut(run.compact.macs, run.dense.macs),
        "params_cut": _cut(run.compact.params, run.dense.params),
        **_paper_cuts(run),
        "minutes": f"{(run.wall_seconds or 0) / 60:.2f}",
        "dense_ms": _number(times and times[0]),
        "compact_ms": _number(times and times[1]),
        "device": run.environment.device if run.environment else "",
        "precision": train.precision,
        "commit": git.commit[:12] if git else "",
        "clean": "" if git is None else "no" if git.changed else "yes",
        "finished": run.finished[:10],
        "note": "",
    }


def _latencies(run: Run) -> tuple[float, float] | None:
    """Return the milliseconds of dense and compact network: of a bench.json that was kept, or of the record."""
    file = run.path / "bench.json"
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"] if file.is_file() else []
    rows = [row for row in rows if row["batch"] == run.latency_batch and row["dense"] and row["compact"]]
    rows = [row for row in rows if row.get("round_to", 0) in (0, run.round_to)]
    times = [(row["dense"]["median_ms"], row["compact"]["median_ms"]) for row in rows]
    return min(times, key=lambda pair: pair[1], default=run.latencies)


def _paper_cuts(run: Run) -> dict[str, str]:
    """Return the cuts as the paper counts them; older records have the figures."""
    dense, compact = run.dense, run.compact
    if dense.paper_flops is not None:
        pairs = (
            (compact.paper_channels, dense.paper_channels),
            (compact.paper_params, dense.paper_params),
            (compact.paper_flops, dense.paper_flops),
        )
    elif run.model in PAPER_NETWORKS:
        with torch.device("meta"):
            network = models.build(run.model, 100 if run.data == "cifar100" else 10)
            counter = PaperCounter(network, torch.empty(1, *models.REGISTRY[run.model].input_shape))
        left, whole = counter.count({site.name: site.kept for site in run.sites}), counter.count()
        pairs = ((left.channels, whole.channels), (left.params, whole.params), (left.flops, whole.flops))
    else:
        sites = sum(site.kept for site in run.sites), sum(site.width for site in run.sites)
        pairs = (sites, (compact.params, dense.params), (compact.macs, dense.macs))
    names = ("paper_channels_cut", "paper_params_cut", "paper_flops_cut")
    return {name: _cut(*pair) for name, pair in zip(names, pairs, strict=True)}


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _cut(kept: int | None, whole: int | None) -> str:
    return "" if kept is None or not whole else f"{100 - 100 * kept / whole:.4f}"


def write_list(results: Path = RESULTS) -> None:
    """Write runs.csv: a row per kept record, and the earlier rows of runs without one."""
    file = results / "runs.csv"
    earlier = list(csv.DictReader(file.read_text(encoding="utf-8").splitlines())) if file.is_file() else []
    notes = {row["folder"]: row["note"] for row in earlier if row["folder"]}
    rows = [row for row in earlier if not row["folder"]]
    for path in results.glob("**/result.json"):
        folder = path.parent.relative_to(results).as_posix()
        rows.append({**row_of(load_run(path.parent), folder), "note": notes.get(folder, "")})
    order = ("data", "network", "name", "seed", "finished", "note")
    rows.sort(key=lambda row: [str(row[key]) for key in order])
    with file.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="*", type=Path)
    parser.add_argument("--network", action="store_true")
    parser.add_argument("--name", default="")
    given = parser.parse_args()
    for each in given.runs:
        print(keep(each, name=given.name, network=given.network))
    write_list()
