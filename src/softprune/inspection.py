"""What can be pruned in a network, before any training: sites, frozen BatchNorms with reasons, what is left at best."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from softprune.errors import ConfigError
from softprune.graph import ChannelGraph, ExampleLike, Frozen, Site, trace
from softprune.masks import check_unmasked
from softprune.plan import make_plan, required_sites
from softprune.surgery import prove

Globs = str | Iterable[str] | None
"""Module names, with * and ? as wildcards."""


@dataclass(frozen=True)
class Inspection:
    """Every BatchNorm of a network, and how small the network can become. Prints as a table."""

    sites: tuple[Site, ...]
    frozen: tuple[Frozen, ...]
    required: frozenset[str]
    """Sites that keep at least one channel, since every path to an output passes through them."""
    macs: int
    params: int
    floor_macs: int
    """MACs left if every site went to its floor."""
    floor_params: int
    unknown_operators: dict[str, str]
    """Operators without a rule -> a place where they stand; what reaches them is frozen."""

    def __str__(self) -> str:
        rows = [(site.name, str(site.width), _described(site, self.required)) for site in self.sites]
        rows += [(frozen.name, str(frozen.width), f"frozen: {frozen.reason}") for frozen in self.frozen]
        name = max((len(row[0]) for row in rows), default=4)
        lines = [f"{'BatchNorm':<{max(name, 9)}}  width  state"]
        lines += [f"{row[0]:<{max(name, 9)}}  {row[1]:>5}  {row[2]}" for row in rows]
        lines += [f"operator without a rule: {op} in {place}" for op, place in self.unknown_operators.items()]
        channels = sum(site.width for site in self.sites)
        lines.append(
            f"{len(self.sites)} sites with {channels:,} channels, {len(self.frozen)} frozen. "
            f"At best {self.floor_macs:,} of {self.macs:,} MACs ({_percent(self.floor_macs, self.macs)}) and "
            f"{self.floor_params:,} of {self.params:,} parameters ({_percent(self.floor_params, self.params)}) stay."
        )
        return "\n".join(lines)


def _described(site: Site, required: frozenset[str]) -> str:
    floor = ", at least 1 channel stays (the way to an output)" if site.name in required else ""
    return f"site, {site.activation}{floor}"


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f}%" if whole else "-"


def inspect(
    model: nn.Module, example: ExampleLike, *, include: Globs = None, exclude: Globs = None
) -> Inspection:
    """Read `model` through one call on `example` and say what softprune could prune of it.

    Args:
        model: Any network. It is left exactly as it was.
        example: What the model is called with: a tensor, a tuple of arguments, or (args, kwargs).
        include: Only these BatchNorms, by name with wildcards.
        exclude: Not these.
    """
    graph = read_graph(model, example, include=include, exclude=exclude)
    required = required_sites(graph)
    floor = make_plan(graph, model, floor_masks(graph, required))
    return Inspection(
        sites=graph.sites,
        frozen=graph.frozen,
        required=required,
        macs=floor.dense_macs,
        params=floor.dense_params,
        floor_macs=floor.macs,
        floor_params=floor.params,
        unknown_operators=graph.unknown,
    )


def floor_masks(graph: ChannelGraph, required: frozenset[str]) -> dict[str, torch.Tensor]:
    """Masks that drop all there is to drop."""
    return {site.name: torch.arange(site.width) < int(site.name in required) for site in graph.sites}


def read_graph(
    model: nn.Module,
    example: ExampleLike,
    *,
    include: Globs = None,
    exclude: Globs = None,
    every_norm: bool = False,
) -> ChannelGraph:
    """The proved channel graph of `model`, with the sites that the globs leave.

    `every_norm`: also BatchNorms that no activation follows, for methods that do not ask about it.
    """
    if isinstance(model, nn.Module):  # what is none is refused below
        check_unmasked(model, "a new pruner")
    included, excluded = _listed("include", include), _listed("exclude", exclude)
    graph = trace(model, example)
    graph = prove(graph.with_every_norm() if every_norm else graph, model)
    return graph.only(_chosen(graph, included, excluded))


def _listed(option: str, globs: Globs) -> list[str]:
    if globs is None:
        return []
    listed = [globs] if isinstance(globs, str) else list(globs) if isinstance(globs, Iterable) else None
    if listed is None or not all(isinstance(glob, str) for glob in listed):
        raise ConfigError(
            f"`{option}` must be a module name or several, with * and ? as wildcards. Got {globs!r}; "
            "pass a string or a list of strings."
        )
    return listed


def _chosen(graph: ChannelGraph, include: list[str], exclude: list[str]) -> dict[str, str]:
    """Sites to freeze -> why, by the user's globs."""
    names = [site.name for site in graph.sites]
    known = names + [frozen.name for frozen in graph.frozen]
    for option, globs in (("include", include), ("exclude", exclude)):
        for glob in globs:
            if not fnmatch.filter(known, glob):
                near = difflib.get_close_matches(glob, known, n=3) or known[:3]
                raise ConfigError(
                    f"`{option}` must name BatchNorms of the model. Got {glob!r}, which matches none; "
                    f"there are {', '.join(map(repr, near))}{' ...' if len(known) > len(near) else ''}."
                )
    for glob in include:
        if glob in exclude:
            raise ConfigError(
                f"`include` and `exclude` must not contradict each other. Got {glob!r} in both."
            )
    left_out = {}
    for name in names:
        if include and not any(fnmatch.fnmatchcase(name, glob) for glob in include):
            left_out[name] = "it is not among those you included"
        elif any(fnmatch.fnmatchcase(name, glob) for glob in exclude):
            left_out[name] = "you excluded it"
    return left_out
