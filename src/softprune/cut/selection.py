"""Choose the BatchNorms to prune: those that pass a trial cut and save something, without those the user excludes."""

import fnmatch
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import nn

from softprune.costs import count_exact
from softprune.cut import dense_macs, floor_masks, make_plan, probe_cuts, without_gc
from softprune.cut.apply import duplicated
from softprune.errors import ConfigError, ModelError, check_types, few_of
from softprune.graph import ChannelGraph, ExampleLike, trace
from softprune.graph.ops import OpaqueOp
from softprune.graph.sites import KINDS
from softprune.log import get_logger
from softprune.masks import check_unmasked

logger = get_logger(__name__)

Globs = str | Iterable[str] | None
"""Module names, with * and ? as wildcards."""


@without_gc()
def read_graph(
    model: nn.Module,
    example: ExampleLike,
    *,
    include: Globs = None,
    exclude: Globs = None,
    every_norm: bool = False,
    kinds: Iterable[str] = (),
) -> ChannelGraph:
    """Return the channel graph of `model` after a trial cut, with the selected sites whose channels can be removed.

    `every_norm` adds BatchNorms that no activation follows, for methods that do not ask about it, and `kinds` adds
    sites of the kinds "sum", "linear" and "stream"; see :mod:`softprune.graph.groups`.
    """
    check_unmasked(model, "a new pruner")
    included = None if include is None else _listed("include", include)
    excluded = [] if exclude is None else _listed("exclude", exclude)
    chosen = check_kinds(kinds)

    def read(**options: bool) -> tuple[ChannelGraph, ChannelGraph]:
        graph = _with_unread(trace(model, example, **options), model).with_kinds(chosen)
        graph = graph.with_every_norm() if every_norm else graph
        return graph, probe_cuts(graph, model)

    graph, probed = read()
    if graph.zeros_may_follow and len(probed.sites) < len(graph.sites):
        probed = max(probed, read(zeros_follow=True)[1], key=lambda each: len(each.sites))
    selected = probed.only(_chosen(probed, included, excluded))
    return selected.only(_irremovable(selected, model))


@check_types
def check_kinds(site_kinds: Iterable[str]) -> tuple[str, ...]:
    """Return the kinds of sites as a tuple, or raise a ConfigError."""
    chosen = (site_kinds,) if isinstance(site_kinds, str) else tuple(site_kinds)
    for kind in chosen:
        if kind not in KINDS:
            raise ConfigError(
                f"kinds of sites must be among {', '.join(KINDS)}. Got {kind!r}. A BatchNorm that an activation "
                "reads is a site in any case."
            )
    return chosen


def _with_unread(graph: ChannelGraph, model: nn.Module) -> ChannelGraph:
    """`graph` with what operators without a rule cost, such as products that no layer makes."""
    if not any(isinstance(op, OpaqueOp) for op in graph.ops):
        return graph
    try:
        counted = count_exact(model, graph.example).macs
    except ModelError:
        logger.debug("operators without a rule were not counted", exc_info=True)
        return graph
    return replace(graph, unread_macs=max(0, counted - dense_macs(graph)))


def _listed(option: str, globs: str | Iterable[str]) -> list[str]:
    listed = [globs] if isinstance(globs, str) else list(globs) if isinstance(globs, Iterable) else None
    if listed is None or not all(isinstance(glob, str) for glob in listed):
        modules = any(isinstance(glob, nn.Module) for glob in listed or ())
        raise ConfigError(
            f"`{option}` must be a module name or several, with * and ? as wildcards. "
            f"Got {'modules' if modules else repr(globs)}; pass a string or a list of strings, such as 'layer1.*' "
            "(model.named_modules() lists the names)."
        )
    return listed


def _chosen(graph: ChannelGraph, include: list[str] | None, exclude: list[str]) -> dict[str, str]:
    """Sites to freeze -> why, by the user's globs."""
    known = [name for site in graph.sites for name in site.members]
    known += [frozen.name for frozen in graph.frozen]
    for option, globs in (("include", include or []), ("exclude", exclude)):
        for glob in globs:
            if not fnmatch.filter(known, glob):
                raise ConfigError(
                    f"`{option}` must name BatchNorms of the model. Got {glob!r}, which matches none; "
                    f"there are {few_of(glob, known)}."
                )
    for glob in include or []:
        if glob in exclude:
            raise ConfigError(f"`include` and `exclude` must not contradict each other. Got {glob!r} in both.")
    left_out = {}
    for site in graph.sites:
        if include is not None and not _matches(site.members, include):
            left_out[site.name] = "it is not among those you included"
        elif _matches(site.members, exclude):
            whole = len(site.members) == 1
            left_out[site.name] = "you excluded it" if whole else "you excluded a BatchNorm of its site"
    return left_out


def _irremovable(graph: ChannelGraph, model: nn.Module) -> dict[str, str]:
    """Sites to freeze -> why: those whose death removes nothing, neither alone nor with that of all others.

    The answer must not depend on the weights: training resumes with the same sites. So it is asked twice, with all
    parameters 0, where constants vanish, and 1, where a division by a parameter is defined. Both must agree.
    """
    if not graph.sites or any(parameter.is_meta for parameter in model.parameters()):
        return {}
    found = _without_effect(graph, model, 0.0)
    if found:
        found &= _without_effect(graph, model, 1.0)
    return dict.fromkeys(found, "no channel can be removed: dead ones are not zero where they are read")


def _without_effect(graph: ChannelGraph, model: nn.Module, value: float) -> set[str]:
    """Sites whose death removes nothing if all parameters are `value`."""

    def fill_(copy: nn.Module) -> None:
        for parameter in copy.parameters():
            parameter.data = torch.full_like(parameter.data, value)

    network, masks = duplicated(model, fill_, share=True), floor_masks(graph)
    floor = make_plan(graph, network, masks)

    def size(kept: Callable[[str], bool]) -> tuple[int, int]:
        plan = make_plan(graph, network, {name: mask for name, mask in masks.items() if kept(name)})
        return plan.macs, plan.params

    return {
        site.name
        for site in graph.sites
        if all(len(floor.modules[name].outputs) == site.width > 1 for name in site.members)
        and size(site.name.__eq__) == (floor.dense_macs, floor.dense_params)
        and size(site.name.__ne__) == (floor.macs, floor.params)
    }


def _matches(names: Iterable[str], globs: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, glob) for name in names for glob in globs)
