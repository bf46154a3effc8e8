"""Timing on a device, and what it computes fast: number formats, and channel counts that tensor cores prefer."""

import math
import time
from collections.abc import Callable

import torch

Call = Callable[[], object]

WARM_UP_CALLS = 3
"""Calls before a capture, as PyTorch's documentation asks for."""
TENSOR_CORE_CHANNELS = 8
"""In half precision, tensor cores process channels in groups of this size."""
IMAGE_CHANNELS = 4
"""An input with at most this many channels is an image, whose channels are never cut."""


def has_fast_bf16(device: torch.device) -> bool:
    """Return whether bfloat16 is computed in hardware. A CPU without it emulates it, which is far slower."""
    if device.type != "cpu":
        return True
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


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


@torch.no_grad()
def time_ms(call: Call, device: torch.device, rounds: int = 5, limit: float = math.inf) -> float:
    """Return the time of one call in milliseconds: the best round, since a busy machine only ever adds.

    A round lasts two milliseconds or longer. After `limit` seconds no further round begins.
    """
    wait = synchronizer(device)
    seconds(call, 2, wait)
    count = max(1, round(0.002 / max(seconds(call, 1, wait), 1e-7)))
    began = time.perf_counter()
    best = seconds(call, count, wait)
    for _ in range(rounds - 1):
        if time.perf_counter() - began > limit:
            break
        best = min(best, seconds(call, count, wait))
    return 1000 * best / count


def capture_graph(body: Call, device: torch.device, *, trial: Call, undo: Call) -> torch.cuda.CUDAGraph:
    """Capture `body` as a CUDA graph: one call replays all of its kernels.

    First run `trial`, which does the same as `body`, a few times, so that libraries choose their algorithms and
    compilers compile. Then `undo` reverts its effects. The capture itself executes nothing.
    """
    # Warm-up and capture share a stream, since autograd records the stream on which a gradient is accumulated.
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP_CALLS):
            trial()
    torch.cuda.current_stream(device).wait_stream(stream)
    undo()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    # Only this thread's calls must be capturable; a loader's thread may pin memory meanwhile.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        body()
    return graph


def alignment_padding(width: int) -> int:
    """Return the number of channels to add to reach a multiple of :data:`TENSOR_CORE_CHANNELS`."""
    return -width % TENSOR_CORE_CHANNELS
