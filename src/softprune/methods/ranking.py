"""Which channels stay, given a score for each: counts are exact, ties go by index, floors and multiples hold."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from softprune.errors import ConfigError, few_of
from softprune.masks import round_up

Ratio = float | Mapping[str, float]
"""The share of channels that goes: one for all sites, or by glob on their names (sites without one stay whole)."""


def drop_lowest(scores: Tensor, count: int) -> Tensor:
    """Booleans, False at the `count` lowest scores; among equals the later ones go first."""
    order = torch.argsort(scores, descending=True, stable=True)
    keep = torch.ones_like(scores, dtype=torch.bool)
    keep[order[len(scores) - min(max(count, 0), len(scores)) :]] = False
    return keep


def fit(keep: Tensor, scores: Tensor, round_to: int, floor: int) -> Tensor:
    """`keep` with the best of the dropped channels added until `floor` and a multiple of `round_to` are reached."""
    if round_to == 1 and floor == 0:
        return keep
    scores = scores.double()
    span = scores.max() - scores.min()
    # round_up wants scores of at most 1.
    scaled = torch.where(span > 0, (scores - scores.min()) / span, torch.zeros_like(scores))
    return round_up(keep, scaled, round_to, floor)


def check_ratio(value: object, name: str = "ratio") -> float:
    """`value` as a share of channels, or an error."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
        raise ConfigError(f"`{name}` is the share of channels that goes, from 0 to below 1. Got {value!r}.")
    return float(value)


def ratio_per_site(ratio: Ratio, sites: Iterable[str], name: str = "ratio") -> dict[str, float]:
    """The share of every site. Of several globs that match, the last one counts."""
    names = list(sites)
    if not isinstance(ratio, Mapping):
        return dict.fromkeys(names, check_ratio(ratio, name))
    shares = dict.fromkeys(names, 0.0)
    for glob, share in ratio.items():
        if not isinstance(glob, str):
            raise ConfigError(f"`{name}` by site must name sites of the model. Got {glob!r} as a name.")
        matching = fnmatch.filter(names, glob)
        if not matching:
            raise ConfigError(
                f"`{name}` by site must name sites of the model. Got {glob!r}, which matches none; there are "
                f"{few_of(glob, names)}."
            )
        shares.update(dict.fromkeys(matching, check_ratio(share, name)))
    return shares
