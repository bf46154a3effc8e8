"""Device helpers: timing, CUDA graphs, fast numbers of channels, and broadcasts between processes."""

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

Call = Callable[[], object]

WARM_UP_CALLS = 3
"""Warm-up calls before a capture, as recommended by PyTorch's documentation."""
WIDTH_MULTIPLE = 8
"""Convolutions are slow on tensor cores and in ONNX Runtime if their channels are not a multiple of this."""
CPU_MULTIPLE = 16
"""float32 channels in an AVX-512 register, the block size in which CPU libraries store feature maps."""
GPU_MULTIPLE = 32
"""Channels per step of the larger tensor-core kernels in half precision."""
IMAGE_CHANNELS = 4
"""An input with at most this many channels is assumed to be an image, whose channels are never removed."""


def has_fast_bf16(device: torch.device) -> bool:
    """Return whether the device computes bfloat16 in hardware. Emulation on a CPU is much slower than float32."""
    if device.type != "cpu":
        return True
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def synchronizer(device: torch.device) -> Call:
    """Return a function that waits for all work on the device."""
    if device.type == "cuda":
        return lambda: torch.cuda.synchronize(device)
    return lambda: None


def seconds(call: Call, number: int, wait: Call) -> float:
    """Return the time of ``number`` calls in seconds, synchronised with the device by ``wait`` before and after."""
    wait()
    start = time.perf_counter()
    for _ in range(number):
        call()
    wait()
    return time.perf_counter() - start


def capture_graph(body: Call, device: torch.device, *, trial: Call, undo: Call) -> torch.cuda.CUDAGraph:
    """Capture `body` as a CUDA graph, which replays all of its kernels in one call.

    `trial`, which does the same as `body`, is called a few times first, so that libraries choose algorithms and
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
    # Restrict the capture to this thread: the pinning thread of a data loader may make calls that cannot be captured.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        body()
    return graph


def is_distributed() -> bool:
    """Return whether this process belongs to a process group of more than one process."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def broadcast_from_rank0_(*tensors: Tensor) -> None:
    """Copy the tensors of rank 0 to all processes, in place. All processes must call this together."""
    if is_distributed():
        for tensor in tensors:
            dist.broadcast(tensor, src=0)


def default_multiple(device: torch.device | str) -> int:
    """Return the multiple of channels at which networks are fast on a device; on a GPU, in half precision."""
    return GPU_MULTIPLE if torch.device(device).type == "cuda" else CPU_MULTIPLE


def fitting_multiple(multiple: int, widths: Sequence[int], required: int) -> int:
    """Return `multiple`, halved until most layers have at least twice as many channels.

    A layer with fewer channels can only be kept or removed as a whole. If most layers cannot be removed, as in a chain
    (`required` is their number), three quarters of the layers must be wide enough, or little could be cut. If most are
    branches that can be removed, more than half of them must be.
    """
    chain = 2 * required > len(widths)
    while multiple > 1:
        held = sum(width >= 2 * multiple for width in widths)
        if 4 * held >= 3 * len(widths) if chain else 2 * held > len(widths):
            break
        multiple //= 2
    return multiple


def disliked_widths(model: nn.Module) -> tuple[int, int, int]:
    """Count plain and depthwise convolutions with channels that are not multiples of WIDTH_MULTIPLE, and all."""
    odd, total = [0, 0], 0
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            depthwise = module.groups > 1 and module.groups == module.in_channels
            # The channels of an image are never removed.
            widths = [module.out_channels, module.in_channels if module.in_channels > IMAGE_CHANNELS else 0]
            odd[depthwise] += any(width % WIDTH_MULTIPLE for width in widths)
            total += 1
    return odd[0], odd[1], total
