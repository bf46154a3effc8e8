"""The share of GPU time spent waiting for images while ResNet-50 trains, and the speed of JPEG decoders.

    python benchmarks/gpu_waiting.py --make 20000 --decode --mode cuda_graph --out waiting.json
    python benchmarks/gpu_waiting.py --make 20000 --size 64 --mode auto --out compiled.json
    python benchmarks/gpu_waiting.py --make 4000 --size 500x375 --mode eager --out large.json
    python benchmarks/gpu_waiting.py --folder DIR --size 64 ...     (real files in the ImageNet layout)

Both measurements use one TrainStep: bf16, channels last, SGD, batch 256. First the batches lie on the device, then
softprune's input pipeline loads them from an image folder and from tar shards.

    waiting = 1 - time of a step with resident batches / time of a step with the pipeline

An epoch is made long enough that none ends during a measurement; the images repeat. The first steps, which use the
batches that the workers had loaded ahead, are not counted. Without --masks a step has no pruner: it is shorter, and
the pipeline has less time for a batch.

The files are made by the script (--make), from noise with the spectrum of photographs. The record is written after
each measurement. A part that fails leaves its error in the record, and the next part follows. Nothing else may use the
machine meanwhile.
"""

import argparse
import contextlib
import gc
import itertools
import json
import os
import platform
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "src"), str(HERE)]

import torch  # noqa: E402
from decoders import decoders  # noqa: E402
from jpeg_files import make_files  # noqa: E402

import softprune  # noqa: E402
from softprune import models  # noqa: E402
from softprune.hardware import seconds, synchronizer  # noqa: E402
from softprune.lab.data import EpochSampler, load_data  # noqa: E402
from softprune.lab.data.batches import LoaderBatches  # noqa: E402
from softprune.lab.data.loader import BatchLoader  # noqa: E402
from softprune.lab.data.shards import write_shards  # noqa: E402
from softprune.lab.train.optim import Schedule, make_sgd  # noqa: E402
from softprune.lab.train.step import StepOptions, TrainStep  # noqa: E402
from softprune.methods import SoftPruner  # noqa: E402
from softprune.methods.optimizer_hooks import undecayed_biases  # noqa: E402

CASES = {"64": ((64, 64), 64, "resnet50_64"), "500x375": ((500, 375), 224, "resnet50")}
"""By the size of the files: width and height, side of the crops, network."""
MAKE = {"64": 20000, "500x375": 4000}
"""Images to make, by the size of the files."""
MODES = ("eager", "cuda_graph", "compile", "auto")
FORMS = ("folder", "webdataset")
EPOCH_STEPS = 4000
"""Steps of an epoch; more than a measurement takes."""


class TimeLimit(BaseException):
    """The time limit is reached. No part catches it as its own failure."""


class Source(LoaderBatches):
    """softprune's loaded batches, or the same tensors again and again from the device's memory."""

    resident: list[tuple[torch.Tensor, torch.Tensor]] | None = None
    """Batches on the device; None loads them."""

    def __init__(self, loader: BatchLoader, batch: int, shape: tuple[int, int, int]) -> None:
        super().__init__(loader, EpochSampler(size=EPOCH_STEPS * batch, batch_size=batch), shape)
        self.blocked: list[float] = []

    def begin(self, epoch: int, start: int) -> None:
        """Start an epoch. Its images repeat, since it is longer than the data set."""
        self.blocked = []
        if self.resident is not None:
            self._coming = itertools.cycle(self.resident)
            return
        self._order = self.sampler.indices(epoch) % len(self.loader.dataset)
        self._coming = self.loader.batches(self._order[start:], self.sampler.draws(epoch)[start:])

    def before_step(self) -> None:
        """Copy the next batch, and note how long the host was blocked."""
        began = time.perf_counter()
        super().before_step()
        self.blocked.append(time.perf_counter() - began)

    def collect(self, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return copies of the first batches of an epoch."""
        self.begin(0, 0)
        copies = []
        for _ in range(count):
            self.before_step()
            copies.append((self._buffers[0].clone(), self._buffers[1].clone()))
        return copies


def waiting(case: str, mode: str, folders: dict[str, Path], options: argparse.Namespace, report: Any) -> None:
    """Time one training step with resident batches and with each form of the files."""
    device = torch.device(options.device)
    gc.collect()
    if mode in ("compile", "auto"):
        torch._dynamo.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    _, crop, model = CASES[case]
    crop, model = options.crop or crop, options.model or model
    bundles = {form: load_data(form, folders[form], image_size=crop) for form in FORMS}
    first = bundles["folder"]
    key = {"part": "waiting", "files": case, "crop": crop, "model": model, "asked_mode": mode, "masks": options.masks}

    # Containers have little shared memory: a worker that finds none left is killed.
    fitting = shared_memory() // (3 * options.batch * 3 * crop * crop)
    counts = sorted({max(1, min(workers, fitting)) for workers in options.workers}, reverse=True)

    def loader(form: str, workers: int) -> BatchLoader:
        return BatchLoader(bundles[form].train, workers=workers, device=device)

    source = Source(loader("folder", counts[0]), options.batch, first.input_shape)
    source.resident = resident = source.collect(4)
    step = make_step(model, first.num_classes, source, mode, options)
    before = timed_steps(step, source, 0, options)
    key |= {"mode": step.mode, "startup_seconds": round(step.startup_seconds, 1)}
    report(key | {"form": "resident", **before})
    for number, (form, workers) in enumerate(itertools.product(FORMS, counts), start=1):
        row = key | {"form": form, "workers": workers}
        try:
            source.loader, source.resident = loader(form, workers), None
            row |= timed_steps(step, source, number, options)
            row["waiting_percent"] = round(100 * (1 - before["ms_per_step"] / row["ms_per_step"]), 2)
            row["loader_alone_images_per_second"] = loader_alone(source, options)
        except Exception as error:
            row |= failure(error)
        report(row)
    source.resident = resident
    report(key | {"form": "resident, at the end", **timed_steps(step, source, 99, options)})


def make_step(model: str, classes: int, source: Source, mode: str, options: argparse.Namespace) -> TrainStep:
    """Return softprune's training step of a new network."""
    torch.manual_seed(0)
    device = source.device
    network = models.build(model, classes).to(device).train()
    if device.type == "cuda":
        network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    pruner = None
    if options.masks:
        pruner = SoftPruner(network, torch.zeros(2, *source.image_shape, device=device), strength=1e-4)
        groups = pruner.parameter_groups(weight_decay=2e-4)
    else:
        groups = undecayed_biases(network, 2e-4)
    # A rate at which noise does not make the weights diverge.
    optimizer = make_sgd(groups, lr=1e-3)
    if pruner is not None:
        pruner.attach(optimizer)
    bf16 = device.type == "cuda"
    step_options = StepOptions(mode=mode, bf16=bf16, channels_last=bf16)
    return TrainStep(network, optimizer, source, schedule=Schedule(base=1e-3), pruner=pruner, options=step_options)


def timed_steps(step: TrainStep, source: Source, epoch: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return the time per step in several blocks, after the batches that were loaded ahead."""
    positions = step.epoch(epoch)
    ahead = 2 * max(options.workers) + 8
    for _ in range(5 if source.resident is not None else ahead):
        next(positions)
    times: list[float] = []
    wait = synchronizer(step.device)
    source.blocked = []
    began = time.perf_counter()
    while len(times) < 3 or time.perf_counter() - began < options.seconds:
        times.append(1000 * seconds(lambda: next(positions), options.block, wait) / options.block)
    positions.close()
    # Of all the steps: where a worker delivers batches in bursts, a median of blocks would hide the waits.
    mean = statistics.mean(times)
    return {
        "ms_per_step": round(mean, 3),
        "ms_per_step_blocks": [round(each, 3) for each in times],
        "images_per_second": round(1000 * options.batch / mean),
        "steps": len(times) * options.block,
        "blocked_ms_median": round(1000 * statistics.median(source.blocked), 3),
        "blocked_ms_mean": round(1000 * statistics.mean(source.blocked), 3),
    }


def loader_alone(source: Source, options: argparse.Namespace) -> int:
    """Return images per second of the pipeline when nothing trains. It continues the epoch that was timed."""
    for _ in range(2 * max(options.workers)):
        source.before_step()
    wait = synchronizer(source.device)
    wait()
    count, began = 0, time.perf_counter()
    while time.perf_counter() - began < options.seconds / 2:
        source.before_step()
        count += 1
    wait()
    return round(count * options.batch / (time.perf_counter() - began))


def shared_memory() -> int:
    """Return the bytes that are free in the memory by which workers pass batches."""
    state = os.statvfs("/dev/shm")
    return state.f_bavail * state.f_frsize


def decode_speed(case: str, root: Path, options: argparse.Namespace, report: Any) -> None:
    """Measure the decoders one after the other."""
    contents = [file.read_bytes() for file in sorted(root.glob("train/*/*"))[: 4 * options.batch]]
    key = {"part": "decode", "files": case, "images": len(contents)}
    for name, measured in decoders(contents, CASES[case][1], options).items():
        try:
            report(key | {"decoder": name} | measured())
        except Exception as error:
            report(key | {"decoder": name} | failure(error))


def failure(error: BaseException) -> dict[str, str]:
    """Return an error as part of a record."""
    return {"error": f"{type(error).__name__}: {error}"[:600]}


def measure(options: argparse.Namespace, report: Any) -> None:
    """Run the parts in order; each one's failure is a row of the record."""
    with contextlib.ExitStack() as stack:
        work = options.work or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ready: dict[str, dict[str, Path]] = {}
        for case in options.size:
            try:
                folder, shards = options.folder or work / case / "folder", work / case / "shards"
                count = options.make or MAKE[case]
                made = {} if options.folder else make_files(folder, CASES[case][0], count, options.processes)
                write_shards(folder, shards)
                report({"part": "files", "files": case, **made})
                ready[case] = {"folder": folder, "webdataset": shards}
            except Exception as error:
                report({"part": "files", "files": case} | failure(error))
        # Before any call of CUDA, since processes are forked.
        for case, folders in ready.items():
            if options.decode:
                decode_speed(case, folders["folder"], options, report)
        if options.device.startswith("cuda") and options.mode:
            report({"part": "device", "device": torch.cuda.get_device_name(options.device)})
        for (case, folders), mode in itertools.product(ready.items(), options.mode):
            try:
                waiting(case, mode, folders, options, report)
            except Exception as error:
                report({"part": "waiting", "files": case, "asked_mode": mode} | failure(error))


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measure what the command line asks for and return the record."""
    options = parse(arguments)
    record: dict[str, Any] = {"what": "GPU time spent waiting for images", "rows": []}
    record["environment"] = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "softprune": softprune.__version__,
        "cores": len(os.sched_getaffinity(0)),
        "shared_memory_mib": shared_memory() // 2**20,
    }
    record["command"] = ["python", "benchmarks/gpu_waiting.py", *(arguments or sys.argv[1:])]
    record["settings"] = {
        name: getattr(options, name) for name in ("batch", "block", "seconds", "decode_seconds", "workers", "processes")
    }
    began = time.perf_counter()

    def report(row: dict[str, Any]) -> None:
        record["rows"].append(row | {"at_seconds": round(time.perf_counter() - began, 1)})
        print(json.dumps(record["rows"][-1]), flush=True)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        partial = options.out.with_suffix(".partial")
        partial.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        partial.replace(options.out)

    def stop(*_: Any) -> None:
        raise TimeLimit

    previous = signal.signal(signal.SIGALRM, stop)
    # Again every few seconds: Python ignores what is raised in a destructor or while a process forks.
    signal.setitimer(signal.ITIMER_REAL, options.time_limit, 3)
    try:
        measure(options, report)
    except TimeLimit:
        signal.setitimer(signal.ITIMER_REAL, 0)
        report({"part": "end", "error": f"the time limit of {options.time_limit:g} s is reached"})
    else:
        report({"part": "end"})
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    return record


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Return the options."""
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the record")
    parser.add_argument("--size", nargs="+", choices=CASES, default=["64"], help="size of the files")
    parser.add_argument("--make", type=int, metavar="N", help="training images to make; by default 20,000 or 4,000")
    parser.add_argument("--folder", type=Path, help="read these files, in the ImageNet layout, instead of making them")
    parser.add_argument("--mode", nargs="*", choices=MODES, default=["eager"], help="how steps run; none: no training")
    parser.add_argument("--masks", action="store_true", help="train with a pruner")
    parser.add_argument("--decode", action="store_true", help="measure decoders too")
    parser.add_argument("--time-limit", type=float, default=300, metavar="SECONDS", help="stop after this time")
    parser.add_argument("--workers", type=int, nargs="+", default=[cores], help="loader processes, each is measured")
    parser.add_argument("--processes", type=int, default=cores, help="processes and threads that decode")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=4, help="length of each measurement")
    parser.add_argument("--decode-seconds", type=float, default=1.5, help="length of each measurement of a decoder")
    parser.add_argument("--block", type=int, default=20, metavar="STEPS", help="steps between two readings")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", help="another network")
    parser.add_argument("--crop", type=int, help="another side of the crops")
    parser.add_argument("--work", type=Path, help="keep the files here")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
