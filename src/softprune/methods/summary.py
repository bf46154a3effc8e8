"""What `pruner.summary()` shows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from softprune.cut import PrunePlan
from softprune.graph import Site


@dataclass(frozen=True)
class SiteSummary:
    """One masked BatchNorm."""

    name: str
    width: int
    kept: int
    floor: int
    rounded: int = 0
    """Dead kept channels: those that a multiple or a floor keeps."""
    left: int = 0
    """Channels in a cut network: fewer than are kept where they are not read, or a coupled site drops them."""


@dataclass(frozen=True)
class Summary:
    """All sites, and what a cut would leave. Prints as a table."""

    sites: tuple[SiteSummary, ...]
    channels: int
    dense_channels: int
    macs: int
    dense_macs: int
    params: int
    dense_params: int
    filled: tuple[str, ...]
    """Modules that keep one channel that is not read, because a shape needs it."""

    def __str__(self) -> str:
        name = max(4, *(len(site.name) for site in self.sites))
        lines = [f"{'site':<{name}}  width  kept"]
        for site in self.sites:
            remark = "  at its floor" if 0 < site.floor == site.kept < site.width else ""
            remark += f"  {site.rounded} dead, kept by rounding or a floor" if site.rounded else ""
            remark += f"  {site.left} left in the cut network" if site.left < site.kept else ""
            lines.append(f"{site.name:<{name}}  {site.width:>5}  {site.kept:>4}{remark}")
        for label, after, before in (
            ("channels", self.channels, self.dense_channels),
            ("MACs", self.macs, self.dense_macs),
            ("parameters", self.params, self.dense_params),
        ):
            lines.append(f"{label}: {after:,} of {before:,} ({100 * (1 - after / max(before, 1)):.1f}% cut)")
        if self.filled:
            lines.append(f"kept one channel that a shape needs: {', '.join(self.filled)}")
        return "\n".join(lines)

    __repr__ = __str__  # what a notebook shows


def summarise(
    sites: Sequence[Site],
    plan: PrunePlan,
    masks: Mapping[str, Tensor],
    dead: Mapping[str, Tensor],
    floors: Mapping[str, int],
) -> Summary:
    """Return the summary of a cut by `plan`, where `masks` keep channels and `dead` says which are dead."""
    rows = [
        SiteSummary(
            name=site.name,
            width=site.width,
            kept=int(masks[site.name].sum()),
            floor=floors[site.name],
            rounded=int((masks[site.name] & dead[site.name]).sum()),
            left=_left(plan, site),
        )
        for site in sites
    ]
    return Summary(
        sites=tuple(rows),
        channels=sum(row.kept for row in rows),
        dense_channels=sum(row.width for row in rows),
        macs=plan.macs,
        dense_macs=plan.dense_macs,
        params=plan.params,
        dense_params=plan.dense_params,
        filled=plan.kept_for_shape,
    )


def _left(plan: PrunePlan, site: Site) -> int:
    if plan.goes(site.name):
        return 0
    return len(plan.modules[site.name].outputs) if site.name in plan.modules else site.width
