"""The channels of a run: what SCP and Slimming decide, the distributions of every layer, and the plane of both.

The script draws the distributions, since a page with every layer drawn would be megabytes. Python chooses the channels,
their order and the range.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import NormalDist, fmean, median_high
from typing import Any

from softprune.lab.report.scales import CANVASES, Canvas, Scale, limits, num, quantile, ticks
from softprune.lab.runs.reading import Run
from softprune.lab.runs.result import SiteRecord

RELU_LIKE = frozenset({"relu", "relu6"})
"""Activations with exactly this rule. Others have a dead probability of their own."""


@dataclass(frozen=True)
class DropRule:
    """The line beta + z |gamma| = delta in the plane of (beta, |gamma|)."""

    delta: float
    c: float

    @property
    def z(self) -> float:
        return NormalDist().inv_cdf(self.c)

    def dead_mass(self, beta: float, gamma: float) -> float:
        """Phi(delta; beta, gamma). The epsilon allows a scale of zero, as in the authors' code."""
        return NormalDist().cdf((self.delta - beta) / (abs(gamma) + 1e-8))

    def drops(self, beta: float, gamma: float) -> bool:
        return self.dead_mass(beta, gamma) > self.c


@dataclass(frozen=True)
class Channel:
    """A channel with both decisions."""

    site: int
    index: int
    beta: float
    gamma: float
    scp_drops: bool
    slimming_drops: bool

    @property
    def quadrant(self) -> str:
        return QUADRANTS[2 * self.scp_drops + self.slimming_drops]


QUADRANTS = ("keep", "slimming", "scp", "drop")


@dataclass(frozen=True)
class Decisions:
    """The recorded channels of a network, and the threshold at which Slimming drops as many as SCP."""

    channels: tuple[Channel, ...]
    rule: DropRule
    threshold: float

    @property
    def counts(self) -> dict[str, int]:
        found = Counter(channel.quadrant for channel in self.channels)
        return {quadrant: found[quadrant] for quadrant in QUADRANTS}


def decide(sites: Sequence[SiteRecord], rule: DropRule, recorded: bool) -> Decisions | None:
    """Both decisions for every channel, or None if no site has recorded shifts and scales.

    With `recorded`, the decisions of SCP are the masks of the run, with its rounding and floors. Otherwise, for a run
    of another method, the rule says what SCP would drop.
    """
    rows = [
        (position, index, beta, abs(gamma), not keep if recorded else rule.drops(beta, gamma))
        for position, site in enumerate(sites)
        if site.has_channels
        for index, (beta, gamma, keep) in enumerate(zip(site.beta, site.gamma, site.keep, strict=True))
    ]
    if not rows:
        return None
    smallest_first = sorted(rows, key=lambda row: row[3])
    number = sum(row[4] for row in rows)
    slimmed = {row[:2] for row in smallest_first[:number]}
    # Between the last channel that Slimming drops and the first that it keeps, where there is one.
    threshold = fmean(row[3] for row in smallest_first[number - 1 : number + 1]) if number else 0.0
    channels = tuple(Channel(*row, slimming_drops=row[:2] in slimmed) for row in rows)
    return Decisions(channels, rule, threshold)


def exemplar(decisions: Decisions, quadrant: str) -> Channel | None:
    """The channel nearest to the median of its quadrant, or None."""
    members = [channel for channel in decisions.channels if channel.quadrant == quadrant]
    if not members:
        return None
    beta, gamma = (median_high(getattr(channel, key) for channel in members) for key in ("beta", "gamma"))
    return min(members, key=lambda channel: (channel.beta - beta) ** 2 + (channel.gamma - gamma) ** 2)


ROWS = 40
KEPT_ROWS = 24
"""Rows for kept channels where both kinds have more channels than rows."""
REACH = 3.3
"""Half-width of a drawn bell curve in standard deviations."""
BELL = "M" + "L".join(
    f"{num(x, 2)} {num(-math.exp(-0.5 * x * x), 3)}" for x in (REACH * (index / 22 - 1) for index in range(45))
)
"""The path of the unit bell curve. Every N(beta, gamma^2) is an affine copy of it."""


def layer(site: SiteRecord, rule: DropRule) -> dict[str, Any]:
    """The data of a layer for the script: in ten-thousandths, with the channels that it draws and their order.

    Kept channels come first, each kind from the most alive to the most dead, evenly thinned to the rows.
    """
    order = sorted(
        range(site.width), key=lambda index: (rule.delta - site.beta[index]) / (abs(site.gamma[index]) + 1e-8)
    )
    kept = [index for index in order if site.keep[index]]
    dropped = [index for index in order if not site.keep[index]]
    room = min(len(kept), max(KEPT_ROWS, ROWS - len(dropped)))
    drawn = [*_thin(kept, room), *_thin(dropped, ROWS - room)]
    thinned = f"; {len(drawn)} drawn, spread evenly" if len(drawn) < site.width else ""
    low, high = _range(site, rule)
    return {
        "name": site.name,
        "tally": f"{site.name}: {site.kept} kept, {len(dropped)} dropped{thinned}",
        "order": drawn,
        "range": [round(low, 4), round(high, 4)],
        "ticks": {canvas.name: ticks(low, high, 4 if canvas.narrow else 9) for canvas in CANVASES},
        "beta": [round(1e4 * value) for value in site.beta],
        "gamma": [round(1e4 * abs(value)) for value in site.gamma],
        "keep": "".join("01"[keep] for keep in site.keep),
    }


def _thin(channels: list[int], rows: int) -> list[int]:
    if len(channels) <= rows:
        return channels
    return [channels[round(row * (len(channels) - 1) / (rows - 1))] for row in range(rows)]


def _range(site: SiteRecord, rule: DropRule) -> tuple[float, float]:
    """All curves but a few outliers. Dead channels may leave the plot on the left."""
    channels = list(zip(site.beta, map(abs, site.gamma), strict=True))
    high = max(quantile([beta + 3.2 * gamma for beta, gamma in channels], 0.995), rule.delta + 0.1)
    low = min(quantile([beta - 3.2 * gamma for beta, gamma in channels], 0.02), rule.delta - 0.1)
    return max(low, rule.delta - 2.5 * (high - rule.delta)), high


def distributions(run: Run, decisions: Decisions) -> dict[str, Any]:
    """The layers for the picker and the data of every channel for the script."""
    sites, layers = [], []
    for position, channels in groupby(decisions.channels, key=lambda channel: channel.site):
        sites.append(run.sites[position])
        kinds = "".join(str(QUADRANTS.index(channel.quadrant)) for channel in channels)
        layers.append({**layer(sites[-1], decisions.rule), "quadrant": kinds})
    return {
        "sites": sites,
        # Show a wide layer first that keeps about half of its channels.
        "chosen": min(sites, key=lambda site: (abs(site.kept / site.width - 0.5) > 0.3, -site.width)),
        "other_activations": sorted({site.activation for site in sites if site.activation not in RELU_LIKE}),
        "drawings": [_shares(canvas) for canvas in CANVASES],
        "data": {"delta": decisions.rule.delta, "sites": layers},
    }


def _shares(canvas: Canvas) -> dict[str, Any]:
    """The axis of the shares right of delta, beside the curves, which end at `split`."""
    split, values = (260.0, [0.0, 1.0]) if canvas.narrow else (690.0, [0.0, 0.5, 1.0])
    shares = Scale(0.0, 1.0, split + 16.0, canvas.width - 14.0, ticks=values)
    return {"canvas": canvas, "split": split, "shares": shares}


def plane(run: Run, decisions: Decisions) -> dict[str, Any]:
    """Every channel by shift and scale, the two decision lines, and a typical channel of each quadrant."""
    channels, rule, threshold = decisions.channels, decisions.rule, decisions.threshold
    low, high = limits([channel.beta for channel in channels], trim=0.002)
    most = max(quantile([channel.gamma for channel in channels], 0.998) * 1.06, threshold * 1.5, 1e-3)
    # Where the line of Slimming would lie on the axis, a square-root axis gives the small scales room.
    root = 0 < threshold < 0.05 * most
    rooted = (0.0, 0.01, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0, 1.5, 2.0, 3.0)
    y_ticks = [tick for tick in rooted if tick <= most] if root else ticks(0.0, most, 5)
    scale_x = Scale(low, high, 52, 606, ticks=ticks(low, high, 6))
    scale_y = Scale(0.0, most, 672, 30, "sqrt" if root else "linear", y_ticks)
    dots: dict[str, set[str]] = {kind: set() for kind in QUADRANTS}
    for channel in channels:
        # Channels on the same half pixel are one dot.
        x, y = round(2 * scale_x.clamp(channel.beta)) / 2, round(2 * scale_y.clamp(channel.gamma)) / 2
        dots[channel.quadrant].add(f"M{num(x)} {num(y)}h0")
    highest = most if rule.z <= 0 else min(most, max((rule.delta - low) / rule.z, 0.0))
    line = [
        (scale_x.clamp(rule.delta - rule.z * gamma), scale_y(gamma))
        for gamma in (highest * step / 40 for step in range(41))
    ]
    return {
        "x": scale_x,
        "y": scale_y,
        "dots": {kind: "".join(sorted(dots[kind])) for kind in ("drop", "keep", "scp", "slimming")},
        "line": "M" + "L".join(f"{num(x)} {num(y)}" for x, y in line),
        # The label stands where the line leaves the points below it.
        "label": line[30],
        "threshold": scale_y(threshold) if threshold > 0 else None,
        "against": sum(channel.scp_drops != rule.drops(channel.beta, channel.gamma) for channel in channels),
        "examples": _examples(run.sites, decisions),
    }


def _examples(sites: Sequence[SiteRecord], decisions: Decisions) -> dict[str, dict[str, Any]]:
    """A typical channel of each quadrant, all to one scale."""
    found = {kind: channel for kind in QUADRANTS if (channel := exemplar(decisions, kind))}
    delta = decisions.rule.delta
    low = min(delta - 0.1, *(channel.beta - REACH * channel.gamma for channel in found.values()))
    high = max(delta + 0.1, *(channel.beta + REACH * channel.gamma for channel in found.values()))
    scale = Scale(low, high, 4, 276)
    pixels = (scale.end - scale.start) / (high - low)
    return {
        kind: {
            "channel": channel,
            "name": sites[channel.site].name,
            # A scale of zero has no width; half a pixel still shows its place.
            "transform": f"matrix({num(max(channel.gamma * pixels, 0.5), 2)} 0 0 46 {num(scale(channel.beta))} 60)",
            "delta": scale(delta),
        }
        for kind, channel in found.items()
    }
