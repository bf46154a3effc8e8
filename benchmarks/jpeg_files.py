"""Image folders for benchmarks: JPEG files of noise with the spectrum of photographs."""

import itertools
import multiprocessing
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image


def make_files(root: Path, size: tuple[int, int], count: int, processes: int) -> dict[str, Any]:
    """Write `count` training images of this width and height in the ImageNet layout; processes share the work."""
    width, height = size
    classes = min(100, count)
    for split, number in itertools.product(("train", "val"), range(classes)):
        (root / split / f"class{number:03d}").mkdir(parents=True, exist_ok=True)
    jobs = [
        (root / split / f"class{number % classes:03d}" / f"{number:06d}.jpg", number, width, height)
        for split, images in (("train", count), ("val", classes))
        for number in range(images)
    ]
    began = time.perf_counter()
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        sizes = pool.map(make_image, jobs, chunksize=max(1, len(jobs) // (4 * processes)))
    seconds = round(time.perf_counter() - began, 1)
    return {"images": count, "bytes_per_image": round(statistics.mean(sizes)), "seconds": seconds}


def make_image(job: tuple[Path, int, int, int]) -> int:
    """Write one JPEG file, and return its bytes. Noise of several scales has about the spectrum of a photograph."""
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
