"""The time that calls take on a device, which may still be at work when they return."""

import time
from collections.abc import Callable

import torch

Call = Callable[[], object]


def waiter(device: torch.device) -> Call:
    """What to call before the clock is read."""
    if device.type == "cuda":
        return lambda: torch.cuda.synchronize(device)
    return lambda: None


def seconds(call: Call, number: int, wait: Call) -> float:
    """Seconds that so many calls take together, from an idle device to an idle one."""
    wait()
    start = time.perf_counter()
    for _ in range(number):
        call()
    wait()
    return time.perf_counter() - start
