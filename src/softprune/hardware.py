"""Timing on a device, and the channel counts that tensor cores prefer."""

import time
from collections.abc import Callable

import torch

Call = Callable[[], object]

TENSOR_CORE_CHANNELS = 8
"""In half precision, tensor cores process channels in groups of this size."""
IMAGE_CHANNELS = 4
"""An input with at most this many channels is an image, whose channels are never cut."""


def synchronizer(device: torch.device) -> Call:
    """Return a function that waits until the device is idle."""
    if device.type == "cuda":
        return lambda: torch.cuda.synchronize(device)
    return lambda: None


def seconds(call: Call, number: int, wait: Call) -> float:
    """Return the seconds that ``number`` calls take, from an idle device to an idle device."""
    wait()
    start = time.perf_counter()
    for _ in range(number):
        call()
    wait()
    return time.perf_counter() - start


def alignment_padding(width: int) -> int:
    """Return the number of channels to add to reach a multiple of :data:`TENSOR_CORE_CHANNELS`."""
    return -width % TENSOR_CORE_CHANNELS
