"""The decisions of SCP and Slimming, channel by channel (the paper's figure 2 on the user's own network).

SCP drops a channel if its normal distribution N(beta, gamma^2) has more than the share `c` of its mass at or below
`delta`: Phi(delta; beta, gamma) > c, which is beta + z_c |gamma| < delta. Slimming drops the channels with the smallest
|gamma| of the whole network; here as many as SCP drops.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

from softprune.runs.result import SiteRecord

DEFAULT_DELTA = 0.05
DEFAULT_C = 0.95

RELU_LIKE = frozenset({"relu", "relu6"})
"""Activations with exactly this rule. Others have a dead probability of their own."""


@dataclass(frozen=True)
class Rule:
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


def rule_of(masks: Mapping[str, Any]) -> Rule:
    """The delta and c of the run, or those of the paper if the run had no soft masks."""
    delta, c = masks.get("delta"), masks.get("c")
    return Rule(
        DEFAULT_DELTA if delta is None else float(delta), float(c) if c is not None and 0.0 < c < 1.0 else DEFAULT_C
    )


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
    rule: Rule
    threshold: float
    recorded: bool

    @property
    def counts(self) -> dict[str, int]:
        found = dict.fromkeys(QUADRANTS, 0)
        for channel in self.channels:
            found[channel.quadrant] += 1
        return found


def decide(sites: Sequence[SiteRecord], rule: Rule, recorded: bool) -> Decisions | None:
    """Both decisions for every channel, or None if no site has recorded shifts and scales.

    With `recorded`, the decisions of SCP are the masks of the run, with its rounding and floors. Otherwise, for a run
    of another method, the rule says what SCP would drop.
    """
    rows: list[tuple[int, int, float, float, bool]] = []
    for position, site in enumerate(sites):
        if not site.has_channels:
            continue
        for index, (beta, gamma, keep) in enumerate(zip(site.beta, site.gamma, site.keep, strict=True)):
            if math.isfinite(beta) and math.isfinite(gamma):
                dropped = not keep if recorded else rule.drops(beta, gamma)
                rows.append((position, index, beta, abs(gamma), dropped))
    if not rows:
        return None
    smallest_first = sorted(range(len(rows)), key=lambda row: rows[row][3])
    number = sum(row[4] for row in rows)
    slimmed = set(smallest_first[:number])
    if number == 0:
        threshold = 0.0
    elif number == len(rows):
        threshold = rows[smallest_first[-1]][3]
    else:
        threshold = 0.5 * (rows[smallest_first[number - 1]][3] + rows[smallest_first[number]][3])
    channels = tuple(Channel(*row, slimming_drops=position in slimmed) for position, row in enumerate(rows))
    return Decisions(channels, rule, threshold, recorded)


def exemplar(decisions: Decisions, quadrant: str) -> Channel | None:
    """The channel nearest to the median of its quadrant, or None."""
    members = [channel for channel in decisions.channels if channel.quadrant == quadrant]
    if not members:
        return None
    middle = len(members) // 2
    beta = sorted(channel.beta for channel in members)[middle]
    gamma = sorted(channel.gamma for channel in members)[middle]
    return min(members, key=lambda channel: (channel.beta - beta) ** 2 + (channel.gamma - gamma) ** 2)
