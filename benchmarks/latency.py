"""Milliseconds per forward of the paper's networks, dense against compact, on a CPU or a GPU.

    python benchmarks/latency.py --device cpu  --out benchmarks/records/latency-cpu.json
    python benchmarks/latency.py --device cuda --out benchmarks/records/latency-h200.json

Without `--run MODEL=FOLDER` (a trained run), channels are removed at random, the same share at every site, until the
paper's MAC reduction is reached (ResNet-50: 54%, from inner widths only, since its shortcuts stay). An existing
record is extended: its rows are not measured again. --merge adds the rows of other records. Of a row that was measured
several times the fastest measurement is kept, because other load on the machine only adds time.
"""

import argparse
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import softprune
from softprune import models
from softprune.bench import compare_latency
from softprune.costs import fastest_multiple, fitting_multiple
from softprune.costs.multiples import round_up
from softprune.cut import PrunePlan, make_plan, required_sites
from softprune.cut.selection import read_graph
from softprune.lab.runs.environment import describe_environment

ROOT = Path(__file__).parent
RECORDS = ROOT / "records"
CUT = {"vgg16": 0.662, "resnet56": 0.515, "densenet40": 0.708, "resnet50": 0.543}
"""Share of the FLOPs that SCP cuts in the paper's tables (CIFAR-10; ImageNet for ResNet-50)."""
CLASSES = {"resnet50": 1000}
SIDES = ("dense", "compact")
MODES = {"+graphs": "reduce-overhead", "+autotune": "max-autotune"}
"""Suffixes of a backend: with CUDA graphs, and with kernels chosen by autotuning."""


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measure what the command line asks for and return the record."""
    options = _parser().parse_args(arguments)
    deadline = time.monotonic() + options.time_limit
    _full_precision()
    if options.threads:
        torch.set_num_threads(options.threads)
    record = _open_record(options)
    if options.merge:
        others = [json.loads(path.read_text(encoding="utf-8"))["rows"] for path in options.merge]
        record["rows"] = least_disturbed([*record["rows"], *itertools.chain(*others)])
        _write(record, options.out)
    runs = dict(item.split("=", 1) for item in options.run)
    kinds = itertools.product(options.models, options.round_to, _dtypes(options), options.gathers, options.fold)
    for name, rounding, dtype, gathers, fold in kinds:
        wanted = [row for row in _wanted(name, rounding, dtype, gathers, fold, options) if not _has(record, row)]
        if name in runs and (rounding, gathers) != ("1", "yes"):
            continue  # a trained run has its own cut
        if not wanted or time.monotonic() > deadline:
            continue
        dense = models.build(name, CLASSES.get(name, 10)).eval()
        example = torch.randn(1, *models.REGISTRY[name].input_shape)
        multiple = int(rounding) if rounding != "auto" else _fast_multiple(dense, example, dtype, options)
        if name in runs:
            compact = softprune.load(Path(runs[name]) / "compact.safetensors", dense)
        else:
            compact = cut_at_random(dense, example, CUT[name], multiple, gathers=gathers == "yes")
        for key in wanted:
            if time.monotonic() > deadline:
                print("time limit reached; run again to resume")
                return record
            backend, plus, mode = key["backend"].partition("+")
            report = compare_latency(
                dense,
                compact,
                example,
                backends=[backend],
                batches=[key["batch"]],
                device=options.device,
                dtype=key["dtype"],
                threads=options.threads,
                channels_last=key["channels_last"],
                compile_mode=MODES.get(plus + mode, "default"),
                fold_bn=key["fold_bn"],
                repeats=options.repeats,
            )
            row = key | {"multiple": multiple, "cut": "trained run" if name in runs else "at random"}
            row["commit"] = describe_environment(torch.device(options.device)).model_dump()["git"]
            row |= {k: v for k, v in report.rows[0].to_dict().items() if k not in row}
            record["rows"].append(row)
            _write(record, options.out)
            print(json.dumps(row), flush=True)
    return record


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RECORDS / "latency-cpu.json", help="extended if it exists")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--models", nargs="+", default=list(CUT), choices=list(CUT))
    parser.add_argument(
        "--backends",
        nargs="+",
        default=None,
        help="[cpu: eager compile onnxruntime; cuda: eager compile compile+graphs]",
    )
    parser.add_argument("--batches", nargs="+", type=int, default=None, help="[cpu: 1 64; cuda: 1 64 256]")
    parser.add_argument("--dtypes", nargs="+", default=None, help="[cpu: float32; cuda: float32 bfloat16]")
    parser.add_argument("--round-to", nargs="+", default=["1", "auto"], help="multiples of channels, or auto")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 for PyTorch's choice")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument(
        "--gathers", nargs="+", default=["yes"], choices=("yes", "no"), help="indices into shared streams"
    )
    parser.add_argument("--fold", nargs="+", default=["no"], choices=("yes", "no"), help="BatchNorms into convolutions")
    parser.add_argument("--run", nargs="+", default=[], metavar="MODEL=FOLDER", help="take the cut of a trained run")
    parser.add_argument("--time-limit", type=float, default=1e9, help="start no measurement after this many seconds")
    parser.add_argument("--merge", nargs="+", type=Path, default=[], help="records to take rows from")
    parser.add_argument("--remarks", default="", help="remarks on a new record for the page")
    return parser


def _fast_multiple(dense: nn.Module, example: Tensor, dtype: str, options: argparse.Namespace) -> int:
    """Return what round_to="auto" would choose."""
    graph = read_graph(dense, example)
    widths = [site.width for site in graph.sites]
    fastest = fastest_multiple(options.device, getattr(torch, dtype))
    return fitting_multiple(fastest, widths, len(required_sites(graph)))


def _dtypes(options: argparse.Namespace) -> list[str]:
    cuda = options.device.startswith("cuda")
    return options.dtypes or (["float32", "bfloat16"] if cuda else ["float32"])


def _wanted(
    name: str, rounding: str, dtype: str, gathers: str, fold: str, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Yield the keys of the rows of one network and cut."""
    cuda = options.device.startswith("cuda")
    backends = options.backends or ["eager", "compile", "compile+graphs" if cuda else "onnxruntime"]
    batches = options.batches or ([1, 64, 256] if cuda else [1, 64])
    for backend, batch in itertools.product(backends, batches):
        yield {
            "model": name,
            "round_to": rounding,
            "gathers": gathers == "yes",
            "fold_bn": fold == "yes",
            "backend": backend,
            "dtype": dtype,
            "batch": batch,
            # Tensor cores read half precision in channels_last; float32 is measured in the default format.
            "channels_last": cuda and dtype != "float32",
        }


KEYS = ("model", "dtype", "backend", "round_to", "gathers", "fold_bn", "own_order", "batch")
"""The keys that identify a row of a record."""


def least_disturbed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the fastest measurement of each row with the number of measurements, sorted."""
    kinds: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in rows:
        kinds.setdefault(tuple(str(row.get(key)) for key in KEYS), []).append(row)
    best = []
    for same in kinds.values():
        timed = [row for row in same if row["speed_up"] is not None] or same[:1]
        row = min(timed, key=lambda row: sum((row[side] or {}).get("median_ms", 0.0) for side in SIDES))
        best.append(row | {"measurements": sum(row.get("measurements", 1) for row in same)})
    order = [*CUT]
    return sorted(best, key=lambda row: (order.index(row["model"]), *(row.get(key) or 0 for key in KEYS[1:])))


def _has(record: dict[str, Any], key: dict[str, Any]) -> bool:
    rows = [row for row in record["rows"] if not row.get("own_order")]  # measured before bench kept the memory format
    return any(all(row[name] == value for name, value in key.items()) for row in rows)


def _write(record: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def _full_precision() -> None:
    """Disable TF32 for float32."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = True  # the fastest algorithms for both networks


def _open_record(options: argparse.Namespace) -> dict[str, Any]:
    environment = describe_environment(torch.device(options.device)).model_dump() | {"threads": torch.get_num_threads()}
    if options.out.exists():
        record = json.loads(options.out.read_text(encoding="utf-8"))
        for key in ("device", "torch", "threads"):
            if record["environment"][key] != environment[key]:
                raise SystemExit(
                    f"{options.out} was made with {key} {record['environment'][key]!r}. Got {environment[key]!r}: "
                    "give another --out."
                )
        return record
    return {
        "format": 1,
        "what": "milliseconds per forward, dense against compact",
        "command": "python benchmarks/latency.py",
        "environment": environment,
        "repeats": options.repeats,
        "remarks": options.remarks,
        "rows": [],
    }


def cut_at_random(
    model: nn.Module, example: Tensor, share: float, multiple: int = 1, seed: int = 0, *, gathers: bool = True
) -> nn.Module:
    """Return a compact network without `share` of its MACs: the same share of channels at random at every site.

    No site is emptied, so that coarse multiples may remove less. Without gathers the decision is the same and removes
    less.
    """
    graph = read_graph(model, example)
    generator = torch.Generator().manual_seed(seed)
    order = {site.name: torch.rand(site.width, generator=generator) for site in graph.sites}

    def plan_at(kept: float, gathers: bool = True) -> PrunePlan:
        masks = {}
        for site in graph.sites:
            count = min(max(round_up(round(kept * site.width), multiple), multiple), site.width)
            masks[site.name] = order[site.name].argsort().argsort() < count
        return make_plan(graph, model, masks, round_to=multiple, gathers=gathers)

    low, high = 0.0, 1.0
    for _ in range(12):
        middle = (low + high) / 2
        plan = plan_at(middle)
        low, high = (low, middle) if plan.macs > (1 - share) * plan.dense_macs else (middle, high)
    return softprune.apply_plan(plan_at(low, gathers), model).eval()


if __name__ == "__main__":
    main()
