"""What to try where a compact network turns out slower than its dense one."""

from collections.abc import Iterable

from torch import nn

from softprune.bench.report import BenchRow
from softprune.graph.inserted import Select
from softprune.hardware import IMAGE_CHANNELS, TENSOR_CORE_CHANNELS, alignment_padding

SLOWER = 0.97
"""A speed-up below this is a loss, not a disturbance."""


def advice(rows: Iterable[BenchRow], compact: nn.Module) -> tuple[str, ...]:
    """A sentence for each thing that may have made `compact` slower than the dense network in any of the rows."""
    slow = [row for row in rows if row.speed_up is not None and row.speed_up < SLOWER]
    if not slow:
        return ()
    found = []
    convolutions = [m for m in compact.modules() if isinstance(m, nn.Conv2d) and m.groups == 1]
    odd = sum(_is_odd(convolution) for convolution in convolutions)
    if odd:
        found.append(
            f"{odd} of {len(convolutions)} convolutions have widths that are no multiple of "
            f"{TENSOR_CORE_CHANNELS}: cut to multiples with compact(round_to={TENSOR_CORE_CHANNELS}) or "
            f"`softprune compact RUN --round-to {TENSOR_CORE_CHANNELS} "
            '--out FOLDER`, or train with round_to="auto" (`--set method.round_to=auto`).'
        )
    selects = sum(isinstance(module, Select) for module in compact.modules())
    if selects:
        found.append(
            f"{selects} layers read their channels of a shared stream through an index: try compact(gathers=False) or "
            "`softprune compact RUN --no-gathers --out FOLDER`."
        )
    if any(row.device == "cuda" and row.compile_mode in ("", "default") for row in slow):
        found.append(
            "On a GPU small networks and batches take the time that the host needs to launch them: try "
            "`--backend compile --compile-mode reduce-overhead`, which records CUDA graphs."
        )
    return tuple(found)


def _is_odd(convolution: nn.Conv2d) -> bool:
    inputs = 0 if convolution.in_channels <= IMAGE_CHANNELS else convolution.in_channels
    return bool(alignment_padding(inputs) or alignment_padding(convolution.out_channels))
