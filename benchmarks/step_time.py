"""Milliseconds per training step: a plain PyTorch loop, softprune's eager step and its fast one, each with
masks and without.

    python benchmarks/step_time.py --out benchmarks/records/step_time.json
    python benchmarks/step_time.py --out benchmarks/records/teacher_time.json --teacher --models resnet56 --batch 128

Images are synthetic, of CIFAR's shape. The record is written after every measurement, so that a run that
meets its time limit keeps what it has; run it again with the same --out and it continues with the rest.

With and without masks are timed in turns in one process: separate ones get different convolution algorithms from
cuDNN's search, which moves a step by more than masks cost.

Compiling takes most of the time and needs no GPU. To share a GPU machine's many cores, start several of these with
one --together FOLDER COUNT and an --out each: all compile at once, then time one after the other; --merge joins
their records. Start-up times from such a run are marked, since the processes slow each other down.
"""

import argparse
import fcntl
import gc
import itertools
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from plain_loop import MEAN, STD, STRENGTH, pixels, plain_steps
from torch import nn

import softprune
from softprune import models
from softprune.lab.data import ArrayDataset, Augmentation, DataBundle
from softprune.lab.data.batches import EpochSampler, make_batches
from softprune.lab.train.optim import Schedule, make_sgd
from softprune.lab.train.step import StepOptions, TrainStep
from softprune.lab.train.teacher import Teacher
from softprune.methods import SoftPruner
from softprune.methods.optimizer_hooks import undecayed_biases

MODELS = ("vgg16", "resnet56", "vgg19", "densenet40", "resnet164")
MODES = {"eager": "eager", "fast": "auto"}
VARIANTS = ("fast", "eager", "plain")


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measure what the command line asks for and return the record."""
    options = _parser().parse_args(arguments)
    deadline = time.monotonic() + options.time_limit
    record = _open_record(options)
    for other in options.merge:
        record["rows"] += json.loads(other.read_text(encoding="utf-8"))["rows"]
        _write(record, options.out)
    # With masks first: its start-up must not find kernels that the other has compiled.
    masks = {"off": (False,), "on": (True,), "both": (True, False)}[options.masks]
    kinds = [{"masks": masked} for masked in masks]
    if options.teacher:
        kinds = [{"masks": True, "teacher": True}, {"masks": True, "teacher": False}]
    for model, variant, precision in itertools.product(options.models, options.variants, options.precisions):
        key = {"model": model, "variant": variant, "precision": precision}
        wanted = [key | kind for kind in kinds]
        wanted = [key for key in wanted if not any(key.items() <= row.items() for row in record["rows"])]
        if not wanted:
            continue
        if time.monotonic() > deadline:
            print("time limit reached; run again to continue")
            break
        for row in _measure(wanted, options):
            record["rows"].append(row)
            print(json.dumps(row), flush=True)
        _write(record, options.out)
    print(table(record["rows"]))
    return record


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON record, extended if it exists")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=sorted(models.REGISTRY))
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=("plain", *MODES))
    parser.add_argument("--masks", default="both", choices=("both", "on", "off"))
    parser.add_argument("--teacher", action="store_true", help="masks with distillation, and without")
    parser.add_argument("--precisions", nargs="+", default=["bf16"], choices=("fp32", "bf16"))
    parser.add_argument("--contiguous", action="store_true", help="channels-first memory order in bf16 too")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--images", type=int, default=50_000)
    parser.add_argument("--steps", type=int, default=100, help="steps per timed block")
    parser.add_argument("--repeats", type=int, default=5, help="timed blocks")
    parser.add_argument("--workers", type=int, default=8, help="loader processes of the plain loop")
    parser.add_argument("--time-limit", type=float, default=540.0, help="start nothing new after this many seconds")
    parser.add_argument(
        "--together", nargs=2, metavar=("FOLDER", "COUNT"), help="compile beside others, time one by one"
    )
    parser.add_argument("--merge", nargs="+", type=Path, default=[], help="records to take rows from")
    parser.add_argument("--profile", type=int, default=0, metavar="ROWS", help="print the costliest kernels")
    return parser


def _open_record(options: argparse.Namespace) -> dict[str, Any]:
    cuda = options.device.startswith("cuda")
    environment = {
        "device": torch.cuda.get_device_name(options.device) if cuda else platform.processor() or "cpu",
        "torch": torch.__version__,
        "cuda": torch.version.cuda if cuda else None,
        "python": platform.python_version(),
        "softprune": softprune.__version__,
        "cores": os.cpu_count(),
    }
    settings = {
        name: getattr(options, name) for name in ("batch", "images", "steps", "repeats", "workers", "contiguous")
    }
    if options.out.exists():
        record = json.loads(options.out.read_text(encoding="utf-8"))
        if record["environment"] != environment or record["settings"] != settings:
            raise SystemExit(
                f"{options.out} was made with {record['environment']}, {record['settings']}. "
                f"Got {environment}, {settings}: give another --out."
            )
        return record
    return {
        "format": 1,
        "what": "milliseconds per training step",
        "command": ["python", "benchmarks/step_time.py", *sys.argv[1:]],
        "environment": environment,
        "settings": settings,
        "rows": [],
    }


def _write(record: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def _measure(keys: list[dict[str, Any]], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of the record, timed in turns; a failure is a result too."""
    gc.collect()
    torch._dynamo.reset()
    if options.device.startswith("cuda"):
        torch.cuda.empty_cache()
    started: list[_Started] = []
    rows = []
    for key in keys:
        try:
            started.append(_start(key, options))
        except Exception as error:
            rows.append(key | {"error": f"{type(error).__name__}: {error}"[:500]})
    if not started:
        return rows
    with _alone(options):
        blocks = _time_blocks([each.steps for each in started], options)
        for each in started:
            if options.profile and each.key["variant"] != "plain":
                print(json.dumps(each.key), flush=True)
                _profile(each.steps, options.profile)
    for each, times in zip(started, blocks, strict=True):
        row = {
            "ms_per_step": round(statistics.median(times), 4),
            "ms_least": round(min(times), 4),
            "ms_most": round(max(times), 4),
            "blocks": len(times),
            "timed_steps": len(times) * options.steps,
            "in_turns": len(started) > 1,
            "startup_seconds": round(each.startup, 2),
            "started_beside_others": bool(options.together),
        }
        rows.append(each.key | row | each.notes())
    return rows


@dataclass(frozen=True)
class _Started:
    """A loop that has taken its first step."""

    key: dict[str, Any]
    steps: Iterator[Any]
    notes: Callable[[], dict[str, Any]]
    startup: float


def _start(key: dict[str, Any], options: argparse.Namespace) -> _Started:
    torch.manual_seed(0)
    network = models.build(key["model"], 10).to(options.device).train()
    began = time.perf_counter()
    make = plain_steps if key["variant"] == "plain" else our_steps
    steps, notes = make(network, key, options)
    next(steps)
    _wait(options.device)
    return _Started(key, steps, notes, time.perf_counter() - began)


@contextmanager
def _alone(options: argparse.Namespace) -> Iterator[None]:
    """Wait until all processes of a --together run are ready, then hold the GPU for this one."""
    if not options.together:
        yield
        return
    folder, count = Path(options.together[0]), int(options.together[1])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"ready-{os.getpid()}").touch()
    deadline = time.monotonic() + options.time_limit
    while len(list(folder.glob("ready-*"))) < count and time.monotonic() < deadline:
        time.sleep(0.2)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _time_blocks(loops: list[Iterator[Any]], options: argparse.Namespace) -> list[list[float]]:
    """Milliseconds per step of every loop in several blocks, which take turns."""
    for steps in loops:
        for _ in range(min(10, options.steps)):
            next(steps)
    blocks: list[list[float]] = [[] for _ in loops]
    for _ in range(options.repeats):
        for steps, times in zip(loops, blocks, strict=True):
            _wait(options.device)
            began = time.perf_counter()
            for _ in range(options.steps):
                next(steps)
            _wait(options.device)
            times.append((time.perf_counter() - began) / options.steps * 1000)
    return blocks


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def our_steps(
    network: nn.Module, key: dict[str, Any], options: argparse.Namespace
) -> tuple[Iterator[Any], Callable[[], dict[str, Any]]]:
    """softprune's own steps, epoch after epoch, and what to note about them when they have run."""
    device = torch.device(options.device)
    bf16 = key["precision"] == "bf16"
    data = ArrayDataset.from_arrays(*pixels(options), mean=MEAN, std=STD, device=device)
    augmentation = Augmentation(pad=4, flip=True)
    bundle = DataBundle(
        name="synthetic", num_classes=10, input_shape=(3, 32, 32), train=data, test=data, augmentation=augmentation
    )
    pruner = None
    if key["masks"]:
        pruner = SoftPruner(network, torch.zeros(2, 3, 32, 32, device=device), strength=STRENGTH)
        groups = pruner.parameter_groups(weight_decay=2e-4)
    else:
        groups = undecayed_biases(network, 2e-4)
    optimizer = make_sgd(groups, lr=0.1)
    if pruner is not None:
        pruner.attach(optimizer)
    step = TrainStep(
        network,
        optimizer,
        make_batches(bundle, EpochSampler(size=options.images, batch_size=options.batch), device=device),
        schedule=Schedule(base=0.1),
        pruner=pruner,
        teacher=_teacher(key["model"], options) if key.get("teacher") else None,
        options=StepOptions(mode=MODES[key["variant"]], bf16=bf16, channels_last=bf16 and not options.contiguous),
    )
    steps = itertools.chain.from_iterable(step.epoch(number) for number in itertools.count())
    return steps, lambda: {"mode": step.mode, "prepare_seconds": round(step.startup_seconds, 2)}


def _teacher(model: str, options: argparse.Namespace) -> Teacher:
    """A dense network of the same kind, as recipes load it."""
    dense = models.build(model, 10).to(options.device).eval().requires_grad_(False)
    if not options.contiguous:
        dense.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return Teacher(dense, weight=0.9, temperature=4.0, checksum="")


def _profile(steps: Iterator[Any], rows: int) -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(5):
            next(steps)
        torch.cuda.synchronize()
    print(profiler.key_averages().table(sort_by="self_cuda_time_total", row_limit=rows, max_name_column_width=90))


def table(rows: list[dict[str, Any]]) -> str:
    """The record as a Markdown table: a line per network and precision."""
    found = {
        (row["model"], row["precision"], row["variant"], row["masks"]): row for row in rows if "ms_per_step" in row
    }
    names = list(dict.fromkeys((row["model"], row["precision"]) for row in rows))
    variants = [name for name in ("plain", *MODES) if any(row["variant"] == name for row in rows)]
    heads = [f"{variant}{suffix}" for variant in variants for suffix in ("", " + masks")]
    lines = [
        "| ms per step | " + " | ".join(heads) + " | masks cost | over plain | start-up s |",
        "|---" * (len(heads) + 4) + "|",
    ]
    for model, precision in names:
        times = {
            cell: found[model, precision, *cell]["ms_per_step"]
            for cell in itertools.product(variants, (False, True))
            if (model, precision, *cell) in found
        }
        cells = [f"{times[cell]:.2f}" if cell in times else "" for cell in itertools.product(variants, (False, True))]
        fast, masked = times.get(("fast", False)), times.get(("fast", True))
        plain = times.get(("plain", True))
        cells.append(f"{100 * (masked / fast - 1):+.1f}%" if fast and masked else "")
        cells.append(f"{plain / masked:.1f}x" if plain and masked else "")
        last = found.get((model, precision, "fast", True))
        cells.append(f"{last['startup_seconds']:.0f}" if last else "")
        lines.append(f"| {model} {precision} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
