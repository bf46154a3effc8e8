"""Devices: timing, CUDA graphs, the widths they compute fast, and what the processes of a group agree on."""

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

Call = Callable[[], object]

WARM_UP_CALLS = 3
"""Calls before a capture, as PyTorch's documentation asks for."""
WIDTH_MULTIPLE = 8
"""Convolutions with widths that are no multiples of this are slow on tensor cores and in ONNX Runtime."""
CPU_MULTIPLE = 16
"""The channels that fill a register of AVX-512, in the blocks of which CPU libraries store feature maps."""
GPU_MULTIPLE = 32
"""The channels of a step of tensor cores' larger kernels in half precision."""
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


def default_multiple(device: torch.device | str) -> int:
    """Return the multiple of channels in which networks are fast on a device, in half precision on a GPU."""
    return GPU_MULTIPLE if torch.device(device).type == "cuda" else CPU_MULTIPLE


def fitting_multiple(multiple: int, widths: Sequence[int], required: int) -> int:
    """Return `multiple`, halved until most layers hold it twice.

    A layer that holds it once can only stay whole or go. Where most layers must stay (`required` counts them), as in a
    chain, three quarters have to hold it twice, or little could be cut. Where most are branches that may go altogether,
    more than half.
    """
    chain = 2 * required > len(widths)
    while multiple > 1:
        held = sum(width >= 2 * multiple for width in widths)
        if 4 * held >= 3 * len(widths) if chain else 2 * held > len(widths):
            break
        multiple //= 2
    return multiple


def disliked_widths(model: nn.Module) -> tuple[int, int, int]:
    """Return the numbers of plain and of depthwise convolutions whose widths are no multiples, and of all."""
    odd, total = [0, 0], 0
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            depthwise = module.groups > 1 and module.groups == module.in_channels
            # The channels of an image are never cut.
            widths = [module.out_channels, module.in_channels if module.in_channels > IMAGE_CHANNELS else 0]
            odd[depthwise] += any(width % WIDTH_MULTIPLE for width in widths)
            total += 1
    return odd[0], odd[1], total
