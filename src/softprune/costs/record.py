"""The result of a count: totals, and the cost of every module."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class ModuleCost:
    """The cost of one module, its submodules not included."""

    kind: str
    """Name of the module's class."""
    macs: int = 0
    """Multiply-accumulates of convolutions and linear layers."""
    params: int = 0
    """Parameters; a tensor shared by several modules counts at the first of them only."""
    flops: int = 0
    """Floating-point operations by the requested rule."""
    channels: int = 0
    """Width of a BatchNorm, 0 for other modules."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The cost of a model. The totals are the sums over `by_module`. Printed, it is a table."""

    counting: str
    """The requested rule: "exact" or "paper"."""
    macs: int
    """Multiply-accumulates of convolutions and linear layers."""
    params: int
    """Parameters, shared ones once."""
    channels: int
    """Sum of the widths of all BatchNorms; with masks, of the channels that are kept."""
    flops: int
    """Twice the MACs (exact), or the authors' FLOPs (paper)."""
    by_module: Mapping[str, ModuleCost] = field(repr=False)
    """Every module with parameters or MACs of its own, by name, in the model's order."""

    @classmethod
    def total(cls, counting: str, by_module: Mapping[str, ModuleCost]) -> "Cost":
        """Sum up `by_module`."""
        parts = by_module.values()
        return cls(
            counting=counting,
            macs=sum(part.macs for part in parts),
            params=sum(part.params for part in parts),
            channels=sum(part.channels for part in parts),
            flops=sum(part.flops for part in parts),
            by_module=by_module,
        )

    def __str__(self) -> str:
        rows = [("module", "kind", "MACs", "params", "channels", "FLOPs")]
        rows += [(name or "(root)", part.kind, *_figures(part)) for name, part in self.by_module.items()]
        rows.append(("total", f"{self.counting} counting", *_figures(self)))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        # Names to the left, figures to the right.
        line = "  ".join(f"{{:{'<' if place < 2 else '>'}{width}}}" for place, width in enumerate(widths))
        heading, *parts, total = (line.format(*row) for row in rows)
        rule = "-" * len(heading)
        return "\n".join([heading, rule, *parts, rule, total])

    __repr__ = __str__  # what a notebook shows


def _figures(part: ModuleCost | Cost) -> tuple[str, str, str, str]:
    return f"{part.macs:,}", f"{part.params:,}", f"{part.channels:,}", f"{part.flops:,}"
