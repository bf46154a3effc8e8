"""What a comparison found: a row for every backend and batch size, and what to try where it disappoints."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from softprune.bench.timing import Timing


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
    """torch.compile's mode; empty for backends that do not compile."""
    fold_bn: bool
    """Whether BatchNorms were folded into the layers before them, in both networks."""
    dense: Timing | None
    compact: Timing | None
    speed_up: float | None
    """Dense time over compact time: the median over neighbouring blocks."""
    speed_up_spread: tuple[float, float] | None
    mac_ratio: float
    """Dense MACs over compact MACs: the speed-up if time were arithmetic."""
    note: str = ""
    """Why there is no measurement."""

    @property
    def realised(self) -> float | None:
        """Speed-up over MAC ratio: 1 where all of the saved arithmetic is saved time."""
        return None if self.speed_up is None else self.speed_up / self.mac_ratio

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a record."""
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
    """All rows of a comparison. Prints as a table."""

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
