"""Alternating timing blocks, and the result of a latency comparison: rows, and advice where it is slow."""

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from softprune.graph.modules import Select
from softprune.hardware import IMAGE_CHANNELS, TENSOR_CORE_CHANNELS, Call, alignment_padding, seconds

BLOCK_SECONDS = 0.02
"""Approximate length of a timed block. Shorter blocks measure the clock."""
MOST_CALLS = 1000


@dataclass(frozen=True)
class Timing:
    """Milliseconds per call over several blocks."""

    blocks: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.blocks)

    @property
    def spread(self) -> tuple[float, float]:
        """Lower and upper quartile."""
        if len(self.blocks) < 2:
            return self.blocks[0], self.blocks[0]
        low, _, high = statistics.quantiles(self.blocks, n=4, method="inclusive")
        return low, high

    def __str__(self) -> str:
        low, high = self.spread
        return f"{self.median:.3g} ms ({low:.3g} to {high:.3g})"


def alternate(
    calls: Mapping[str, Call],
    *,
    repeats: int = 15,
    warm_up: int = 3,
    finish: Call = lambda: None,
    block_seconds: float = BLOCK_SECONDS,
) -> dict[str, Timing]:
    """Time every call, after `warm_up` untimed ones, in `repeats` blocks in turns: A B, B A, A B, ...

    `finish` is called before the clock is read, to synchronise with a GPU.
    """
    for call in calls.values():
        for _ in range(warm_up):
            call()
    # The same number of calls per block for all, so that a fixed cost per block has the same weight.
    slowest = max(seconds(call, 1, finish) for call in calls.values())
    number = min(max(int(block_seconds / max(slowest, 1e-9)), 1), MOST_CALLS)
    blocks: dict[str, list[float]] = {name: [] for name in calls}
    order = list(calls)
    for _ in range(repeats):
        for name in order:
            blocks[name].append(1000 * seconds(calls[name], number, finish) / number)
        order.reverse()
    return {name: Timing(tuple(values)) for name, values in blocks.items()}


def paired_ratio(slow: Timing, fast: Timing) -> tuple[float, float, float]:
    """Return median, lower and upper quartile of the ratio slow / fast of neighbouring blocks."""
    ratios = Timing(tuple(a / b for a, b in zip(slow.blocks, fast.blocks, strict=True)))
    return ratios.median, *ratios.spread


SLOWER = 0.97
"""A speed-up below this counts as slower; above it the difference may be noise."""


@dataclass(frozen=True, kw_only=True)
class BenchRow:
    """Dense against compact under one backend and batch size."""

    backend: str
    device: str
    dtype: str
    batch: int
    threads: int
    channels_last: bool
    compile_mode: str
    """The mode of torch.compile, empty for backends that do not compile."""
    fold_bn: bool
    """Whether BatchNorms were folded into the layers before them, in both networks."""
    dense: Timing | None
    compact: Timing | None
    speed_up: float | None
    """Dense time over compact time, the median over neighbouring blocks."""
    speed_up_spread: tuple[float, float] | None
    mac_ratio: float
    """Dense MACs over compact MACs, the speed-up if time were proportional to MACs."""
    note: str = ""
    """Why there is no measurement."""

    @property
    def realised(self) -> float | None:
        """Speed-up over MAC ratio: 1 where the whole MAC reduction becomes speed-up."""
        return None if self.speed_up is None else self.speed_up / self.mac_ratio

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for a JSON record."""
        values = asdict(self) | {"realised": self.realised}
        values["speed_up_spread"] = self.speed_up_spread and [*self.speed_up_spread]
        for side in ("dense", "compact"):
            timing: Timing | None = getattr(self, side)
            values[side] = timing and {
                "median_ms": timing.median,
                "low_ms": timing.spread[0],
                "high_ms": timing.spread[1],
                "blocks": len(timing.blocks),
            }
        return values


@dataclass(frozen=True)
class BenchReport:
    """The rows of a latency comparison. Prints as a table."""

    rows: tuple[BenchRow, ...]
    dense_macs: int
    compact_macs: int
    advice: tuple[str, ...] = ()
    """What to try where the compact network was slower."""

    def __str__(self) -> str:
        lines = [
            f"MACs per input: {self.dense_macs:,} dense, {self.compact_macs:,} compact",
            f"{'backend':<12} {'device':<5} {'dtype':<9} {'batch':>5}  {'dense':<28} {'compact':<28} "
            f"{'speed-up':<22} realised",
        ]
        for row in self.rows:
            head = f"{row.backend:<12} {row.device:<5} {row.dtype:<9} {row.batch:>5}  "
            if row.speed_up is None or row.speed_up_spread is None or row.realised is None:
                lines.append(head + row.note)
                continue
            low, high = row.speed_up_spread
            faster = f"{row.speed_up:.2f} ({low:.2f} to {high:.2f})"
            lines.append(f"{head}{row.dense!s:<28} {row.compact!s:<28} {faster:<22} {row.realised:.2f}")
        return "\n".join([*lines, *self.advice])

    __repr__ = __str__  # what a notebook shows


def advice(rows: Iterable[BenchRow], compact: nn.Module) -> tuple[str, ...]:
    """Return a sentence for each likely cause that made `compact` slower than the dense network in a row."""
    slow = [row for row in rows if row.speed_up is not None and row.speed_up < SLOWER]
    if not slow:
        return ()
    found = []
    convolutions = [m for m in compact.modules() if isinstance(m, nn.Conv2d) and m.groups == 1]
    # The channels of an image are never cut.
    odd = sum(
        bool(alignment_padding(each.out_channels))
        or (each.in_channels > IMAGE_CHANNELS and bool(alignment_padding(each.in_channels)))
        for each in convolutions
    )
    if odd:
        found.append(
            f"{odd} of {len(convolutions)} convolutions have widths that are not multiples of "
            f"{TENSOR_CORE_CHANNELS}: `--round-to {TENSOR_CORE_CHANNELS}` shows what multiples gain. Train with "
            'round_to="auto" (`--set method.round_to=auto`), or, if the training had no target, cut with '
            f"compact(round_to={TENSOR_CORE_CHANNELS}) or `softprune compact RUN --round-to {TENSOR_CORE_CHANNELS} "
            "--out FOLDER`."
        )
    selects = sum(isinstance(module, Select) for module in compact.modules())
    if selects:
        found.append(
            f"{selects} layers read their channels of a shared stream through an index: if the training had no target, "
            "try compact(gathers=False) or `softprune compact RUN --no-gathers --out FOLDER`."
        )
    if any(row.device == "cuda" and row.compile_mode in ("", "default") for row in slow):
        found.append(
            "On a GPU the launches of the host limit small networks and batches: try "
            "`--backend compile --compile-mode reduce-overhead`, which uses CUDA graphs."
        )
    return tuple(found)
