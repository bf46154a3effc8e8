"""The speed of JPEG decoders: Pillow and torchvision in processes and threads, nvJPEG on the GPU."""

import argparse
import itertools
import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.nn.functional as F
from vision import import_torchvision

from softprune.hardware import seconds, synchronizer
from softprune.lab.data.images import decode_image, image_tensor


def decoders(contents: list[bytes], crop: int, options: argparse.Namespace) -> dict[str, Callable[[], dict[str, Any]]]:
    """Return what measures each decoder. Processes come first: they must not fork from a CUDA context."""
    import_torchvision()
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "Pillow, processes": lambda: in_processes(decode_pillow, contents, options),
        "torchvision, processes": lambda: in_processes(decode_torchvision, contents, options),
        "torchvision, threads": lambda: in_threads(contents, options),
    }
    if options.device.startswith("cuda"):
        parts["torchvision on the GPU"] = lambda: on_gpu(contents, 0, options)
        parts["torchvision on the GPU, then crop and resize"] = lambda: on_gpu(contents, crop, options)
    return parts


def decode_pillow(content: bytes) -> Any:
    """Decode as softprune's workers do."""
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
    rounds, elapsed = 0, 0.0
    while elapsed < options.decode_seconds:
        elapsed += seconds(lambda: [decode(batch) for batch in batches], 1, synchronizer(device))
        rounds += 1
    rate = rounds * len(encoded) / elapsed
    return {
        "batch": options.batch,
        "images_per_second": round(rate),
        "ms_per_batch": round(1e3 * options.batch / rate, 2),
    }
