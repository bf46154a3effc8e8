"""Devices: timing, CUDA graphs, and what the processes of a group agree on."""

import math
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

Call = Callable[[], object]

WARM_UP_CALLS = 3
"""Calls before a capture, as PyTorch's documentation asks for."""


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


def is_distributed() -> bool:
    """Return whether this process is one of several in a process group."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def broadcast_from_rank0_(*tensors: Tensor) -> None:
    """Copy the tensors of rank 0 to every process. All processes must call this together."""
    if is_distributed():
        for tensor in tensors:
            dist.broadcast(tensor, src=0)


def computed_by_rank0(compute: Callable[[], int], device: torch.device) -> int:
    """Return what ``compute`` returns in rank 0, which alone calls it. All processes must call this together."""
    if not is_distributed():
        return compute()
    value = torch.tensor(compute() if dist.get_rank() == 0 else 0, device=device)
    broadcast_from_rank0_(value)
    return int(value)
