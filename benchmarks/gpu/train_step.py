"""Milliseconds of one training step: softprune's step beside plain loops under torch.compile, images on the GPU.

    python benchmarks/gpu/train_step.py --out /tmp/gpu/train_step.json

Batch 128, bf16 autocast, channels-last, SGD, random crops and flips. All cells compile at the same time, each in a
process, and then take turns on the GPU. Processes that are not ready after --compile-limit seconds are stopped and have
no time in the record. It takes at most 150 s on 16 cores.
"""

import argparse
import fcntl
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import softprune
from softprune import models
from softprune.lab.config.settings import OptimizerConfig, TrainConfig
from softprune.lab.data import ArrayDataset, Augmentation, DataBundle, EpochSampler
from softprune.lab.train.step import TrainStep, make_optimizer
from softprune.methods import SoftPruner

MODELS = ("vgg16", "resnet56")
FORMS = ("scp", "reduce-overhead", "max-autotune", "eager")
"""SCP compiled in a CUDA graph; a plain dense loop in modes of torch.compile, and eager."""
SEED, BATCH, IMAGES = 0, 128, 50_000
MEAN, STD = (125.3, 123.0, 113.9), (63.0, 62.1, 66.7)
BLOCKS, STEPS = 5, 60
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def synthetic() -> tuple[Tensor, Tensor]:
    """Return random images of CIFAR's shape, as bytes, and labels."""
    chance = torch.Generator().manual_seed(SEED)
    pixels = torch.randint(0, 256, (IMAGES, 3, 32, 32), dtype=torch.uint8, generator=chance)
    return pixels, torch.randint(0, 10, (IMAGES,), generator=chance)


def scp_steps(network: torch.nn.Module) -> Iterator[int]:
    """Yield after each step of softprune's own training."""
    device = torch.device(DEVICE)
    data = ArrayDataset.from_arrays(*synthetic(), mean=MEAN, std=STD, device=device)
    crops = Augmentation(pad=4, flip=True)
    bundle = DataBundle(train=data, test=data, num_classes=10, augmentation=crops)
    pruner = SoftPruner(network, bundle.example(2, device), strength=1e-4)
    pruner.updates_on_step = False
    optimizer = make_optimizer(OptimizerConfig(), pruner.parameter_groups(weight_decay=2e-4))
    pruner.attach(optimizer)
    batches = bundle.batches(EpochSampler(size=IMAGES, batch_size=BATCH), device)
    train = TrainConfig(precision="bf16")
    step = TrainStep(network, optimizer, batches, schedule=lambda step: 0.1, train=train, pruner=pruner)
    for epoch in range(1000):
        yield from step.epoch(epoch)


def plain_steps(network: torch.nn.Module, mode: str) -> Iterator[int]:
    """Yield after each step of a loop that anybody would write, with the images on the GPU."""
    images, labels = (tensor.to(DEVICE) for tensor in synthetic())
    mean, std = (torch.tensor(values, device=DEVICE).view(3, 1, 1) for values in (MEAN, STD))
    optimizer = torch.optim.SGD(network.parameters(), 0.1, 0.9, nesterov=True, weight_decay=2e-4, fused=True)

    def batch_loss(indices: Tensor) -> Tensor:
        pixels = F.pad((images[indices] - mean) / std, (4, 4, 4, 4))
        top, left = torch.randint(0, 9, (2, BATCH, 1), device=DEVICE)
        side = torch.arange(32, device=DEVICE)
        columns = torch.where(torch.rand(BATCH, 1, device=DEVICE) < 0.5, side, 31 - side) + left
        rows = torch.arange(BATCH, device=DEVICE)[:, None, None]
        crops = pixels.permute(0, 2, 3, 1)[rows, (side + top)[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
        with torch.autocast(DEVICE, dtype=torch.bfloat16, cache_enabled=False):
            logits = network(crops)
        return F.cross_entropy(logits.float(), labels[indices])

    compute = batch_loss if mode == "eager" else torch.compile(batch_loss, mode=mode, dynamic=False)
    while True:
        for indices in torch.randperm(IMAGES, device=DEVICE).split(BATCH)[:-1]:
            compute(indices).backward()
            optimizer.step()
            optimizer.zero_grad()
            yield 0


def measure(model: str, form: str, folder: Path) -> None:
    """Prepare one cell, wait until the others are ready, time it alone, and write its row."""
    torch.manual_seed(SEED)
    torch.backends.cudnn.benchmark = torch.backends.cudnn.allow_tf32 = True
    network = models.build(model, 10).to(DEVICE, memory_format=torch.channels_last).train()
    steps = scp_steps(network) if form == "scp" else plain_steps(network, form)

    def seconds(number: int) -> float:
        began = time.perf_counter()
        for _ in range(number):
            next(steps)
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    startup = seconds(10)
    (folder / f"{model} {form}.ready").touch()
    while not (folder / "go").exists():
        time.sleep(0.05)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        seconds(STEPS)
        times = [round(1000 * seconds(STEPS) / STEPS, 4) for _ in range(BLOCKS)]
    row = {"ms": statistics.median(times), "blocks": times, "startup_seconds": round(startup, 1)}
    (folder / f"{model} {form}.json").write_text(json.dumps(row))


def measure_all(folder: Path, limit: float) -> list[dict[str, Any]]:
    """Return the rows of all cells, each measured in a process of its own."""
    command, environment = [sys.executable, __file__, "--cell"], os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "4"}
    cells = [(model, form) for model in MODELS for form in FORMS]
    running = {cell: subprocess.Popen([*command, *cell, str(folder)], env=environment) for cell in cells}

    def compiling() -> list[subprocess.Popen[bytes]]:
        unready = {cell: process for cell, process in running.items() if process.poll() is None}
        return [unready[cell] for cell in unready if not (folder / f"{' '.join(cell)}.ready").exists()]

    deadline = time.monotonic() + limit
    while compiling() and time.monotonic() < deadline:
        time.sleep(0.2)
    for process in compiling():
        process.kill()
    (folder / "go").touch()
    rows = []
    for cell, process in running.items():
        code, file = process.wait(), folder / f"{' '.join(cell)}.json"
        row = json.loads(file.read_text()) if file.exists() else {"ms": None, "exit_code": code}
        rows.append({"model": cell[0], "form": cell[1], **row})
        print(f"{cell[0]:9} {cell[1]:16} {row['ms']}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the record")
    parser.add_argument("--compile-limit", type=float, default=115, help="seconds until everything must be compiled")
    parser.add_argument("--cell", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cell:
        return measure(options.cell[0], options.cell[1], Path(options.cell[2]))
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    record = {
        "what": "milliseconds per training step, median of blocks; compiled side by side, timed alone",
        "seed": SEED,
        "batch": BATCH,
        "precision": "bf16",
        "device": torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu",
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda, "softprune": softprune.__version__},
        "commit": commit or None,
    }
    with tempfile.TemporaryDirectory() as folder:
        record["rows"] = measure_all(Path(folder), options.compile_limit)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
