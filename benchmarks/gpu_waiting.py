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
import multiprocessing
import os
import platform
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "src"), str(HERE)]

import torch  # noqa: E402

import softprune  # noqa: E402
from softprune import models  # noqa: E402
from softprune.data import EpochSampler, load_data  # noqa: E402
from softprune.data.batches import LoaderBatches  # noqa: E402
from softprune.data.loader import BatchLoader  # noqa: E402
from softprune.data.shards import write_shards  # noqa: E402
from softprune.methods import SoftPruner  # noqa: E402
from softprune.methods.optimizer_hooks import undecayed_biases  # noqa: E402
from softprune.train.optim import Schedule, make_sgd  # noqa: E402
from softprune.train.step import StepOptions, TrainStep  # noqa: E402

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
    source.blocked = []
    began = time.perf_counter()
    while len(times) < 3 or time.perf_counter() - began < options.seconds:
        times.append(1000 * timed(lambda: [next(positions) for _ in range(options.block)], step.device) / options.block)
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
    synchronise(source.device)
    count, began = 0, time.perf_counter()
    while time.perf_counter() - began < options.seconds / 2:
        source.before_step()
        count += 1
    synchronise(source.device)
    return round(count * options.batch / (time.perf_counter() - began))


def shared_memory() -> int:
    """Return the bytes that are free in the memory by which workers pass batches."""
    state = os.statvfs("/dev/shm")
    return state.f_bavail * state.f_frsize


def timed(function: Callable[[], Any], device: torch.device) -> float:
    """Return the seconds of a call, up to the end of the device's work."""
    synchronise(device)
    began = time.perf_counter()
    function()
    synchronise(device)
    return time.perf_counter() - began


def synchronise(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def make_files(case: str, count: int, root: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Write JPEG files in the ImageNet layout; processes share the work."""
    (width, height), _, _ = CASES[case]
    classes = min(100, count)
    for split, number in itertools.product(("train", "val"), range(classes)):
        (root / split / f"class{number:03d}").mkdir(parents=True, exist_ok=True)
    jobs = [
        (root / split / f"class{number % classes:03d}" / f"{number:06d}.jpg", number, width, height)
        for split, size in (("train", count), ("val", classes))
        for number in range(size)
    ]
    began = time.perf_counter()
    with multiprocessing.get_context("fork").Pool(options.processes) as pool:
        sizes = pool.map(make_image, jobs, chunksize=max(1, len(jobs) // (4 * options.processes)))
    seconds = round(time.perf_counter() - began, 1)
    return {"images": count, "bytes_per_image": round(statistics.mean(sizes)), "seconds": seconds}


def make_image(job: tuple[Path, int, int, int]) -> int:
    """Write one JPEG file, and return its bytes. Noise of several scales has about the spectrum of a photograph."""
    import numpy as np
    from PIL import Image

    path, seed, width, height = job
    generator = np.random.default_rng(seed)
    total = np.zeros((height, width, 3), np.float32)
    for cells, weight in ((4, 0.35), (16, 0.3), (64, 0.2), (256, 0.15)):
        columns, rows = min(cells, width), max(1, min(cells, width) * height // width)
        noise = Image.fromarray(generator.integers(0, 256, (rows, columns, 3), dtype=np.uint8))
        total += weight * np.asarray(noise.resize((width, height), Image.Resampling.BICUBIC), np.float32)
    # About the bytes of Tiny-ImageNet's and of ImageNet's files, on which the time of decoding depends.
    Image.fromarray(total.astype(np.uint8)).save(path, quality=75 if width <= 64 else 96)
    return path.stat().st_size


def decoders(case: str, root: Path, options: argparse.Namespace, report: Any) -> None:
    """Measure the decoders one after the other. Processes come first: they must not fork from a CUDA context."""
    from vision import import_torchvision

    import_torchvision()
    files = sorted(root.glob("train/*/*"))[: 4 * options.batch]
    contents = [file.read_bytes() for file in files]
    key = {"part": "decode", "files": case, "images": len(contents)}
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "Pillow, processes": lambda: in_processes(decode_pillow, contents, options),
        "torchvision, processes": lambda: in_processes(decode_torchvision, contents, options),
        "torchvision, threads": lambda: in_threads(contents, options),
    }
    if options.device.startswith("cuda"):
        parts["torchvision on the GPU"] = lambda: on_gpu(contents, 0, options)
        parts["torchvision on the GPU, then crop and resize"] = lambda: on_gpu(contents, CASES[case][1], options)
    for name, part in parts.items():
        try:
            report(key | {"decoder": name} | part())
        except Exception as error:
            report(key | {"decoder": name} | failure(error))


def decode_pillow(content: bytes) -> Any:
    """Decode as softprune's workers do."""
    from softprune.data.images import decode_image, image_tensor

    return image_tensor(decode_image(content))


def decode_torchvision(content: bytes) -> Any:
    """Decode with torchvision on the CPU."""
    from torchvision.io import ImageReadMode, decode_jpeg

    return decode_jpeg(torch.frombuffer(bytearray(content), dtype=torch.uint8), mode=ImageReadMode.RGB)


def in_processes(decode: Callable[[bytes], Any], contents: list[bytes], options: argparse.Namespace) -> dict[str, Any]:
    """Return the rate of all processes together, each of which decodes all images again and again."""
    decode(contents[0])
    with multiprocessing.get_context("fork").Pool(options.processes) as pool:
        arguments = [(decode, contents, number, options.decode_seconds) for number in range(options.processes)]
        rates = pool.starmap(decode_loop, arguments, chunksize=1)
    return {"processes": options.processes, "images_per_second": round(sum(rates))}


def decode_loop(decode: Callable[[bytes], Any], contents: list[bytes], first: int, seconds: float) -> float:
    """Return the images per second of one process."""
    torch.set_num_threads(1)
    turn = itertools.islice(itertools.cycle(contents), first, None)
    count, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        decode(next(turn))
        count += 1
    return count / (time.perf_counter() - began)


def in_threads(contents: list[bytes], options: argparse.Namespace) -> dict[str, Any]:
    """Return the rate of torchvision's decoder in threads of one process."""
    decode_torchvision(contents[0])
    threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(options.processes) as pool:
            loops = [
                pool.submit(decode_loop, decode_torchvision, contents, number, options.decode_seconds)
                for number in range(options.processes)
            ]
            rate = sum(loop.result() for loop in loops)
    finally:
        torch.set_num_threads(threads)
    return {"threads": options.processes, "images_per_second": round(rate)}


def on_gpu(contents: list[bytes], crop: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return the rate of nvJPEG by torchvision, in batches; with `crop`, to a batch of crops of that side."""
    import torch.nn.functional as F
    from torchvision.io import ImageReadMode, decode_jpeg

    device = torch.device(options.device)
    encoded = [torch.frombuffer(bytearray(content), dtype=torch.uint8) for content in contents]
    batches = [encoded[start : start + options.batch] for start in range(0, len(encoded), options.batch)]

    def decode(batch: list[torch.Tensor]) -> None:
        images = decode_jpeg(batch, mode=ImageReadMode.RGB, device=device)
        if crop:
            # The same share of each image: a random crop costs the same.
            parts = [image[None, :, : image.shape[1] * 3 // 4, : image.shape[2] * 3 // 4] for image in images]
            small = [F.interpolate(part.float(), (crop, crop), mode="bilinear", antialias=True) for part in parts]
            torch.cat(small)

    decode(batches[0])
    rounds, seconds = 0, 0.0
    while seconds < options.decode_seconds:
        seconds += timed(lambda: [decode(batch) for batch in batches], device)
        rounds += 1
    rate = rounds * len(encoded) / seconds
    return {
        "batch": options.batch,
        "images_per_second": round(rate),
        "ms_per_batch": round(1e3 * options.batch / rate, 2),
    }


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
                made = {} if options.folder else make_files(case, options.make or MAKE[case], folder, options)
                write_shards(folder, shards)
                report({"part": "files", "files": case, **made})
                ready[case] = {"folder": folder, "webdataset": shards}
            except Exception as error:
                report({"part": "files", "files": case} | failure(error))
        # Before any call of CUDA, since processes are forked.
        for case, folders in ready.items():
            if options.decode:
                decoders(case, folders["folder"], options, report)
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
