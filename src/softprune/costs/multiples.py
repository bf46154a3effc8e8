"""The multiple of channels at which convolutions are fastest on this machine, for `round_to="auto"`.

A width of 57 may take as long as one of 64, or longer; whether it does depends on the processor and the library. So
some widths are timed, and for every candidate multiple the times of those widths, rounded up to it, are added. A
multiple that does not help costs time, since the channels it adds are computed, too.
"""

import functools
import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from softprune.devices import Call, seconds, synchronizer
from softprune.log import get_logger

logger = get_logger(__name__)

MULTIPLES = (1, 2, 4, 8, 16, 32)
WIDTHS = (37, 45, 50, 58, 67, 75, 86, 91, 99, 110)
"""What pruning leaves of layers of 64 and 128 channels: odd numbers, far from any multiple."""
TIE = 0.01
"""Multiples whose times differ by less than this share are as fast as each other."""
_ROUNDS = 7
_SECONDS = 0.002


def fastest_multiple(device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> int:
    """Return the multiple of channels at which pruned convolutions are fastest. Measured once per setting."""
    place = torch.device(device)
    return _fastest(str(place), dtype, torch.get_num_threads() if place.type == "cpu" else 0)


@functools.lru_cache
def _fastest(device: str, dtype: torch.dtype, threads: int) -> int:
    times = time_widths(sorted({round_up(w, m) for w in WIDTHS for m in MULTIPLES}), device, dtype)
    totals = multiple_costs(times.__getitem__)
    best = choose_multiple(totals)
    logger.info(
        'round_to="auto" is %d on %s: relative time %s',
        best,
        device,
        ", ".join(f"{multiple}: {total / totals[1]:.2f}" for multiple, total in totals.items()),
    )
    return best


def fitting_multiple(multiple: int, widths: Sequence[int], required: int) -> int:
    """`multiple`, halved until most layers hold it twice.

    A layer that holds it once can only stay whole or go. Where most layers must stay (`required` counts them), as in a
    chain, three quarters have to hold it twice, or little could be cut. Where most are branches that may go altogether,
    more than half: ResNet-56, a third of whose layers have 16 channels, is faster in multiples of 16 than of 8 on
    machines with fast multiples of 16 (benchmarks/records/README.md).
    """
    chain = 2 * required > len(widths)
    while multiple > 1:
        held = sum(width >= 2 * multiple for width in widths)
        if 4 * held >= 3 * len(widths) if chain else 2 * held > len(widths):
            break
        multiple //= 2
    return multiple


def round_up(width: int, multiple: int) -> int:
    """Return the next multiple."""
    return -(-width // multiple) * multiple


def multiple_costs(time_of: Callable[[int], float]) -> dict[int, float]:
    """Return for every candidate multiple the time of all widths, rounded up to it."""
    return {multiple: sum(time_of(round_up(w, multiple)) for w in WIDTHS) for multiple in MULTIPLES}


def choose_multiple(totals: dict[int, float]) -> int:
    """Return the fastest multiple; of several that tie, the largest.

    It keeps more channels in the same time; runtimes with blocked layouts, such as ONNX Runtime, are faster with it.
    """
    limit = (1 + TIE) * min(totals.values())
    return max(multiple for multiple, total in totals.items() if total <= limit)


@torch.no_grad()
def time_widths(widths: Sequence[int], device: str, dtype: torch.dtype) -> dict[int, float]:
    """Return for every width the seconds of a 3 x 3 convolution that keeps the width, the least of several rounds."""
    place = torch.device(device)
    batch, side = (64, 28) if place.type == "cuda" else (4, 14)
    # Half precision runs on tensor cores, which want the channels last.
    last = place.type == "cuda" and dtype in (torch.bfloat16, torch.float16)
    order = torch.channels_last if last else torch.contiguous_format
    wait = synchronizer(place)
    calls: dict[int, tuple[Call, int]] = {}
    for width in widths:
        image = torch.randn(batch, width, side, side, device=place).to(dtype).contiguous(memory_format=order)
        weight = torch.randn(width, width, 3, 3, device=place).to(dtype).contiguous(memory_format=order)
        call: Call = functools.partial(F.conv2d, image, weight, padding=1)
        seconds(call, 3, wait)
        number = 10 if place.type == "cuda" else round(_SECONDS / max(seconds(call, 1, wait), 1e-7))
        calls[width] = call, max(1, number)
    best = dict.fromkeys(widths, math.inf)
    for _ in range(_ROUNDS):  # in turns, so that a disturbance does not fall on one width alone
        for width, (call, number) in calls.items():
            best[width] = min(best[width], seconds(call, number, wait) / number)
    return best
