"""Options of pruners and their validation."""

import fnmatch
import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict, get_args, get_type_hints, is_typeddict

from torch import Tensor

from softprune.budget import TableLike
from softprune.cut.selection import Globs
from softprune.errors import ConfigError, few_of, is_integer, is_number
from softprune.graph import Site
from softprune.target import TargetLike

Shares = float | Mapping[str, float]
"""A share of channels for all sites, or shares by glob pattern on site names (0 for sites without a match)."""
Keep = float | Mapping[str, float | Sequence[float]]
"""Minimum share of channels for all sites, or by glob pattern on site names, where it can be (minimum, maximum)."""
RoundTo = int | Literal["auto"]
"""A multiple of channels, or "auto" for a multiple that is fast on the device of the model."""


class PrunerOptions(TypedDict, total=False):
    """Options of all pruning methods, in addition to the model, the example and the method's own options."""

    include: Globs
    """Prune only these BatchNorms: names or glob patterns. Default: all that can be masked."""
    exclude: Globs
    """Do not prune these BatchNorms: names or glob patterns."""
    seed: int
    """Seed of the method's random numbers, if it uses any. Default: 0."""
    round_to: RoundTo
    """Keep a multiple of this many channels at every site. "auto" is 32 on a GPU and 16 on a CPU, halved until most
    sites have at least twice as many channels; ``pruner.round_to`` is the result. Default: 8 with a target if most
    sites have at least 32 channels, since runtimes compute other widths slowly; otherwise 1."""
    keep: Keep
    """Keep at least this share of channels at every site, or at some: ``{"layer4.*": 0.5}``. With a target, a maximum
    can be added: ``{"layer4.*": (0.1, 0.5)}``. Default: 0."""
    min_channels: int
    """Keep at least this many channels at every site. Regardless of it, a site on the only path to an output keeps one
    channel. Coupled sites, such as those around a depthwise convolution, keep this many in common. Default: 0."""


class TargetOptions(PrunerOptions, total=False):
    """Options of methods that rank channels and accept a target instead of a ratio."""

    target: TargetLike | None
    """Target of the cut, instead of a ratio: ``{"macs": 0.5}`` keeps at most half of the MACs. See
    :class:`softprune.SoftPruner`."""
    latency_table: TableLike | None
    """For a latency target on another machine: a result of :func:`softprune.budget.latency_table`, or its file."""


def keywords_of(pruner: type) -> tuple[str, ...]:
    """Return the keyword arguments of a pruner class, including those of its options TypedDict or its base class."""
    names: list[str] = []
    for init in (vars(cls)["__init__"] for cls in pruner.__mro__ if "__init__" in vars(cls)):
        parameters = list(inspect.signature(init).parameters.values())[3:]  # after self, model, example
        names += [each.name for each in parameters if each.kind is not inspect.Parameter.VAR_KEYWORD]
        rest = [each.name for each in parameters if each.kind is inspect.Parameter.VAR_KEYWORD]
        declared = [each for each in get_args(get_type_hints(init).get("".join(rest))) if is_typeddict(each)]
        names += [name for each in declared for name in get_type_hints(each)]
        if declared or not rest:
            break
    return tuple(dict.fromkeys(names))


# --- checks -----------------------------------------------------------------------------------------------------------


def check_strength(strength: float | Tensor) -> None:
    """Raise a ConfigError unless the strength is a finite number of at least 0."""
    if isinstance(strength, Tensor) and strength.numel() == 1:
        if strength.device.type != "cpu":
            return  # reading it would synchronise with the device
        strength = strength.item()
    if not is_number(strength) or not 0 <= strength < math.inf:
        raise ConfigError(f"`strength` must be a finite number of at least 0. Got {strength!r}; try 1e-4.")


def check_share(name: str, value: object) -> float:
    """Return `value` as a float; raise a ConfigError unless it is in [0, 1)."""
    if not is_number(value) or not 0 <= value < 1:
        raise ConfigError(f"`{name}` is a share of channels, from 0 to below 1. Got {value!r}.")
    return float(value)


def shares_by_site(name: str, shares: Shares, sites: Sequence[Site]) -> dict[str, float]:
    """Return the share of every site. If several patterns match, the last one is used."""
    names = [site.name for site in sites]
    if not isinstance(shares, Mapping):
        return dict.fromkeys(names, check_share(name, shares))
    found = dict.fromkeys(names, 0.0)
    for glob, share in shares.items():
        matching = fnmatch.filter(names, glob) if isinstance(glob, str) else []
        if not matching:
            raise ConfigError(
                f"`{name}` by site must match sites of the model. Got {glob!r}, which matches none; sites are "
                f"{few_of(str(glob), names)}."
            )
        found.update(dict.fromkeys(matching, check_share(name, share)))
    return found


def limits_by_site(keep: Keep, sites: Sequence[Site]) -> tuple[dict[str, float], dict[str, float]]:
    """Return the minimum and the maximum share of channels of every site, as set by `keep`."""
    if not isinstance(keep, Mapping):
        return shares_by_site("keep", keep, sites), {site.name: 1.0 for site in sites}
    pairs = {glob: each if isinstance(each, Sequence) else (each, 1.0) for glob, each in keep.items()}
    for glob, pair in pairs.items():
        if len(pair) != 2 or not all(map(is_number, pair)) or not 0 <= pair[0] <= pair[1] <= 1 or not pair[1]:
            raise ConfigError(
                "`keep` by site is the minimum share of channels, from 0 to below 1, or (minimum, maximum), with a "
                f"maximum above 0. Got {keep[glob]!r} for {glob!r}."
            )
    gone = shares_by_site("keep", {glob: 1 - pair[1] for glob, pair in pairs.items()}, sites)
    least = shares_by_site("keep", {glob: pair[0] for glob, pair in pairs.items()}, sites)
    return least, {name: 1 - share for name, share in gone.items()}


def check_positive(name: str, value: object) -> float:
    """Return `value` as a float; raise a ConfigError unless it is a finite number above 0."""
    if not is_number(value) or not 0 < value < math.inf:
        raise ConfigError(f"`{name}` must be a number above 0. Got {value!r}.")
    return float(value)


def check_target(target: TargetLike | None, instead: str, given: object, **options: object) -> None:
    """Raise a ConfigError if a target is combined with `given`, or if `options` of targets are set without one."""
    if target is not None and given is not None:
        raise ConfigError(
            f"{instead} and a `target` exclude each other: the target determines what is removed. Got {given!r} and "
            f"target = {target!r}; pass one of them."
        )
    for name, value in options.items():
        if target is None and value is not None:
            raise ConfigError(f"`{name}` needs a `target`. Got {value!r} without one; set `target`, or omit it.")


def check_round_to(round_to: int) -> None:
    """Raise a ConfigError unless `round_to` is an integer of at least 1."""
    if not is_integer(round_to) or round_to < 1:
        raise ConfigError(f"round_to must be an integer of at least 1. Got {round_to!r}.")
