"""Images per second of softprune's folder and shards, of torchvision's ImageFolder + DataLoader, and of timm's loader.

    python make_tinyimagenet.py DIR                       (the files; any folder in the ImageNet layout will do)
    python benchmarks/input_pipeline.py DIR [--workers 2] [--rounds 3] [--work DIR]
    python benchmarks/input_pipeline.py --render          (the table of docs/scale.md)

All loaders read the same files with the same number of workers, crop and flip them at random in the same ranges with
bilinear resizing, and deliver normalised float32 batches in the main process. Every measurement is a process of its
own; the loaders take turns, and the median of the rounds counts. The time of the CPU is measured too: unlike the wall
time it hardly depends on what else the machine does. ImageNet's files are stood in for by the same images enlarged to
500 x 375 pixels, ImageNet's usual size. Writes benchmarks/records/input_pipeline.json.
"""

import argparse
import contextlib
import itertools
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "src"), str(HERE)]
RECORD = HERE / "records" / "input_pipeline.json"

CASES = {
    "small 64": ("64 x 64 to 64", "small", 64),
    "small 224": ("64 x 64 to 224", "small", 224),
    "large 224": ("500 x 375 to 224", "large", 224),
}
"""Title, files, and side of the crops."""
LOADERS = {
    "softprune folder": "softprune, images in folders",
    "softprune shards": "softprune, tar shards",
    "torchvision uint8": "torchvision ImageFolder + DataLoader, bytes normalised after loading",
    "torchvision": "torchvision ImageFolder + DataLoader, ToTensor and Normalize in the workers",
    "timm": "timm create_loader, with its prefetcher",
}


def batches(name: str, folder: Path, shards: Path, options: argparse.Namespace) -> Iterator[Any]:
    """Yield normalised batches of training images."""
    if name.startswith("softprune"):
        yield from _softprune(name, folder, shards, options)
    elif name.startswith("torchvision"):
        yield from _torchvision(folder, options, in_workers=name == "torchvision")
    else:
        yield from _timm(folder, options)


def _softprune(name: str, folder: Path, shards: Path, options: argparse.Namespace) -> Iterator[Any]:
    import torch

    from softprune.lab.data import EpochSampler, load_data, make_batches
    from softprune.rng import Clock

    kind, root = ("folder", folder) if name == "softprune folder" else ("webdataset", shards)
    bundle = load_data(kind, root, image_size=options.size)
    sampler = EpochSampler(size=len(bundle.train), batch_size=options.batch)
    source = make_batches(bundle, sampler, device=torch.device("cpu"), workers=options.workers)
    source.begin(0, 0)
    clock = Clock(0)
    for position in range(sampler.steps):
        source.before_step()
        for first, second in source.micro_batches(torch.tensor([position])):
            yield source.batch(first, second, clock)


def _torchvision(folder: Path, options: argparse.Namespace, *, in_workers: bool) -> Iterator[Any]:
    import torch
    from vision import import_torchvision

    torchvision = import_torchvision()
    from torchvision import transforms

    mean, std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    last = [transforms.ToTensor(), transforms.Normalize(mean, std)] if in_workers else [transforms.PILToTensor()]
    transform = transforms.Compose(
        [transforms.RandomResizedCrop(options.size, antialias=True), transforms.RandomHorizontalFlip(), *last]
    )
    data = torchvision.datasets.ImageFolder(str(folder / "train"), transform)
    loader = torch.utils.data.DataLoader(
        data, batch_size=options.batch, shuffle=True, num_workers=options.workers, drop_last=True
    )
    centre, spread = (torch.tensor(values).view(-1, 1, 1) * 255 for values in (mean, std))
    for images, labels in loader:
        yield (images if in_workers else (images.float() - centre) / spread), labels


def _timm(folder: Path, options: argparse.Namespace) -> Iterator[Any]:
    import torch
    from vision import import_timm

    import_timm()
    from timm.data import create_loader
    from timm.data.dataset_factory import create_dataset

    data = create_dataset("", root=str(folder), split="train", is_training=True)
    yield from create_loader(
        data,
        input_size=(3, options.size, options.size),
        batch_size=options.batch,
        is_training=True,
        scale=(0.08, 1.0),
        ratio=(3 / 4, 4 / 3),
        hflip=0.5,
        color_jitter=0,
        interpolation="bilinear",
        num_workers=options.workers,
        use_prefetcher=True,
        pin_memory=False,
        device=torch.device("cpu"),
    )


def enlarge(folder: Path, out: Path, count: int) -> None:
    """Write the first images of a folder in 500 x 375 pixels, with the same classes in both splits."""
    from PIL import Image

    files = sorted(folder.glob("train/*/*"))
    files = files[:: max(1, len(files) // count)]
    for file in files:
        for split in ("train", "val"):
            place = out / split / file.parent.name
            place.mkdir(parents=True, exist_ok=True)
            if split == "train" or not any(place.iterdir()):
                with Image.open(file) as image:
                    image.convert("RGB").resize((500, 375), Image.Resampling.BICUBIC).save(
                        place / f"{file.stem}.jpg", quality=95
                    )


def measure(name: str, folder: Path, shards: Path, options: argparse.Namespace) -> dict[str, float]:
    """Return images per second and CPU milliseconds per image after the first batches."""
    import torch

    torch.set_num_threads(1)
    source = batches(name, folder, shards, options)
    for _ in range(options.warm):
        images, labels = next(source)
    assert images.shape == (options.batch, 3, options.size, options.size)
    assert images.dtype == torch.float32
    assert labels.shape == (options.batch,)
    began, busy = time.perf_counter(), cpu_seconds()
    for _ in range(options.batches):
        next(source)
    seconds, busy = time.perf_counter() - began, cpu_seconds() - busy
    count = options.batches * options.batch
    return {"images_per_second": count / seconds, "cpu_ms_per_image": 1e3 * busy / count}


def cpu_seconds() -> float:
    """Return the CPU time so far of this process and of its workers, which are alive."""
    ticks = 0
    for process in (os.getpid(), *(child.pid for child in multiprocessing.active_children())):
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def measure_all(work: Path, options: argparse.Namespace) -> dict[tuple[str, str], list[dict[str, float]]]:
    """Measure every loader in turn; what an interrupted call has measured in ``work`` is kept."""
    from softprune.lab.data.shards import write_shards

    folders = {"small": options.folder, "large": work / "large"}
    for kind in sorted({CASES[case][1] for case in options.cases}):
        if (work / f"{kind}-shards" / "classes.txt").exists():
            continue
        if kind == "large":
            enlarge(options.folder, folders["large"], options.batch * (options.batches + options.warm + 8))
        write_shards(folders[kind], work / f"{kind}-shards")
    notes = work / "figures.json"
    done: dict[str, dict[str, float]] = json.loads(notes.read_text()) if notes.exists() else {}
    figures: dict[tuple[str, str], list[dict[str, float]]] = {}
    for number, case, name in itertools.product(range(options.rounds), options.cases, LOADERS):
        key = f"{number} {case} {name}"
        if key not in done:
            _, kind, size = CASES[case]
            command = [sys.executable, __file__, str(folders[kind]), "--one", name]
            command += ["--shards", str(work / f"{kind}-shards"), "--size", str(size)]
            for setting in ("batch", "batches", "warm", "workers"):
                command += [f"--{setting}", str(getattr(options, setting))]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            ended = subprocess.run(command, env=environment, capture_output=True, text=True)
            if ended.returncode:
                raise RuntimeError(f"{name} failed: {ended.stderr}")
            done[key] = json.loads(ended.stdout.splitlines()[-1])
            notes.write_text(json.dumps(done))
            print(key, done[key], flush=True)
        figures.setdefault((case, name), []).append(done[key])
    return figures


def render(record: dict[str, Any]) -> str:
    """Return the table of a record."""
    rows = {(row["loader"], row["case"]): row for row in record["rows"]}
    cases = [case for case in CASES if (next(iter(LOADERS)), case) in rows]
    heads = [f"{CASES[case][0]}: images/s | CPU ms an image" for case in cases]
    lines = [f"| loader | {' | '.join(heads)} |", "|---|" + "---:|---:|" * len(cases)]
    for name, title in LOADERS.items():
        cells = []
        for case in cases:
            row = rows[name, case]
            cells += [f"{row['images_per_second']:,.0f}", f"{row['cpu_ms_per_image']:.3f}"]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> None:
    """Measure all loaders and write the record, or measure one, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--warm", type=int, default=4)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", type=Path, help="keep files and figures here, and resume after an interruption")
    parser.add_argument("--record", type=Path, default=RECORD)
    parser.add_argument("--render", action="store_true")
    parser.add_argument("--one", choices=LOADERS, help=argparse.SUPPRESS)
    parser.add_argument("--shards", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--size", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.render:
        print(render(json.loads(options.record.read_text())), end="")
        return
    if options.one:
        print(json.dumps(measure(options.one, options.folder, options.shards, options)))
        return

    from softprune.distributed import pick_device
    from softprune.lab.runs.environment import describe_environment

    with contextlib.ExitStack() as stack:
        work = options.work or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        figures = measure_all(work, options)
    record = {
        "what": "training images per second of data loaders, median of the rounds",
        "images": "100 classes of Tiny-ImageNet, JPEG files of 64 x 64 pixels",
        **{key: getattr(options, key) for key in ("batch", "batches", "workers", "rounds")},
        "cores": len(os.sched_getaffinity(0)),
        "rows": [
            {
                "loader": name,
                "case": case,
                **{
                    key: round(statistics.median(row[key] for row in rows), 4)
                    for key in ("images_per_second", "cpu_ms_per_image")
                },
                "rounds": rows,
            }
            for (case, name), rows in figures.items()
        ],
        "environment": describe_environment(pick_device("cpu")).model_dump(),
    }
    options.record.write_text(json.dumps(record, indent=1) + "\n")
    print(render(record), end="")


if __name__ == "__main__":
    main()
