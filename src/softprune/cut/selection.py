"""Select the BatchNorms to prune, and inspect a network: sites, frozen BatchNorms with reasons, smallest cost."""

import fnmatch
from collections.abc import Iterable
from dataclasses import dataclass, replace

from torch import nn

from softprune.costs import cost
from softprune.cut.analyses import floor_masks, required_sites
from softprune.cut.plan import dense_macs, make_plan
from softprune.cut.trial import trial_cut
from softprune.errors import ConfigError, ModelError, few_of, first_few
from softprune.graph import ChannelGraph, ExampleLike, Frozen, Site, trace
from softprune.graph.channels import KINDS, OpaqueOp
from softprune.log import get_logger
from softprune.masks import check_unmasked

logger = get_logger(__name__)

Globs = str | Iterable[str] | None
"""Module names or glob patterns with * and ?."""
NO_BATCHNORM = (
    "This network has no BatchNorm. softprune needs BatchNorms, whose shift and scale tell how likely a channel is "
    "dead. Add BatchNorms between convolutions and activations, or use a variant of the network that has them."
)
KIND_WORDS = {"sum": "of a sum of BatchNorms", "linear": "without an activation", "stream": "of a residual stream"}


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

    `every_norm` adds BatchNorms without a following activation, for methods that do not depend on it. `kinds` adds
    sites of the kinds "sum", "linear" and "stream"; see :mod:`softprune.graph.sites`.
    """
    check_unmasked(model, "a new pruner")
    included = None if include is None else _listed("include", include)
    excluded = [] if exclude is None else _listed("exclude", exclude)
    graph = _with_unread(trace(model, example), model).with_kinds(kinds, every_norm=every_norm)
    graph = trial_cut(graph, model)
    return graph.only(_chosen(graph, included, excluded))


def nothing_to_prune(model: nn.Module, graph: ChannelGraph, chosen: bool) -> ModelError:
    """Return the error for a network without sites, with the reasons and a remedy.

    ``chosen``: whether the user includes or excludes BatchNorms, which may be the reason.
    """
    if not graph.frozen:
        return ModelError(NO_BATCHNORM)
    reasons = dict.fromkeys(f"'{item.name}': {item.reason}" for item in graph.frozen)
    remedy = "Change `include` and `exclude`" if chosen else "docs/sites.md explains which BatchNorms can be masked"
    further = {} if chosen else graph.further_kinds()
    if further:
        counts = ", ".join(f'"{kind}" {count}' for kind, count in further.items())
        remedy = f"Use SoftPruner with site_kinds={tuple(further)!r}, which may mask some of them: {counts}"
    return ModelError(
        f"no BatchNorm of this {type(model).__name__} can be masked. {first_few([*reasons], 5)}. {remedy}."
    )


def _with_unread(graph: ChannelGraph, model: nn.Module) -> ChannelGraph:
    """Add the cost of operators without a rule, such as products outside of layers, to `graph`."""
    if not any(isinstance(op, OpaqueOp) for op in graph.ops):
        return graph
    try:
        counted = cost(model, graph.example)
    except ModelError:
        logger.debug("could not count the cost of operators without a rule", exc_info=True)
        return graph
    written = sum(layer.written * len(layer.outputs) for layer in graph.layers)
    return replace(
        graph,
        unread_macs=max(0, counted.macs - dense_macs(graph)),
        unread_activations=max(0, counted.activations - written),
    )


def _listed(option: str, globs: str | Iterable[str]) -> list[str]:
    listed = [globs] if isinstance(globs, str) else list(globs) if isinstance(globs, Iterable) else None
    if listed is None or not all(isinstance(glob, str) for glob in listed):
        modules = any(isinstance(glob, nn.Module) for glob in listed or ())
        raise ConfigError(
            f"`{option}` must be one or several module names or glob patterns with * and ?. "
            f"Got {'modules' if modules else repr(globs)}; pass a string or a list of strings, such as 'layer1.*' "
            "(model.named_modules() lists the names)."
        )
    return listed


def _chosen(graph: ChannelGraph, include: list[str] | None, exclude: list[str]) -> dict[str, str]:
    """Return the sites to freeze by the user's patterns, with the reasons."""
    known = [name for site in graph.sites for name in site.members]
    known += [frozen.name for frozen in graph.frozen]
    for option, globs in (("include", include or []), ("exclude", exclude)):
        for glob in globs:
            if not fnmatch.filter(known, glob):
                raise ConfigError(
                    f"`{option}` must match BatchNorms of the model. Got {glob!r}, which matches none; "
                    f"BatchNorms are {few_of(glob, known)}."
                )
    for glob in include or []:
        if glob in exclude:
            raise ConfigError(f"`include` and `exclude` must not contradict each other. Got {glob!r} in both.")
    left_out = {}
    for site in graph.sites:
        if include is not None and not _matches(site.members, include):
            left_out[site.name] = "you did not include it"
        elif _matches(site.members, exclude):
            whole = len(site.members) == 1
            left_out[site.name] = "you excluded it" if whole else "you excluded a BatchNorm of its site"
    return left_out


def _matches(names: Iterable[str], globs: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, glob) for name in names for glob in globs)


@dataclass(frozen=True)
class Inspection:
    """The BatchNorms of a network and its smallest possible cost. Prints as a table."""

    sites: tuple[Site, ...]
    frozen: tuple[Frozen, ...]
    required: frozenset[str]
    """Sites that keep at least one channel, since every path to an output passes through them."""
    macs: int
    params: int
    floor_macs: int
    """MACs if every site is cut to its floor."""
    floor_params: int
    unknown_operators: dict[str, str]
    """Maps operators without a rule that freeze channels to a source location."""
    unreached: tuple[str, ...]
    """Parameters that the forward pass on the example does not use. Channels that only they read may be removed."""
    size_dependence: str
    """The first operator that depends on the input size; empty if there is none."""
    available: dict[str, int]
    """Maps kinds of sites that were not requested to the number of frozen BatchNorms that they would mask."""

    def __str__(self) -> str:
        if not self.sites and not self.frozen:
            return NO_BATCHNORM
        rows = [
            (name, str(site.width), _described(site, name, self.required))
            for site in self.sites
            for name in site.members
        ]
        rows += [(frozen.name, str(frozen.width), f"frozen: {frozen.reason}") for frozen in self.frozen]
        rows.insert(0, ("BatchNorm", "width", "state"))
        longest = max(len(name) for name, _, _ in rows)
        lines = [f"{name:<{longest}}  {width:>5}  {state}" for name, width, state in rows]
        lines += [f"operator without a rule: {op} in {place}" for op, place in self.unknown_operators.items()]
        if any(not operator.startswith("aten.") for operator in self.unknown_operators):
            lines.append("softprune.graph.add_operator adds a rule for a custom operator (docs/sites.md)")
        if self.unreached:
            shown = first_few(self.unreached)
            lines.append(f"not used by the example, so channels that only these read may be removed: {shown}")
        if self.size_dependence:
            lines.append(f"forward() depends on the input size ({self.size_dependence}): verify cuts at each size")
        if self.available:
            more = ", ".join(f'"{kind}" masks {count}' for kind, count in self.available.items())
            lines.append(f"further sites with site_kinds: {more} of the frozen BatchNorms")
        channels = sum(site.width for site in self.sites)
        lines.append(
            f"{len(self.sites)} sites with {channels:,} channels, {len(self.frozen)} frozen. "
            f"At best {self.floor_macs:,} of {self.macs:,} MACs ({_percent(self.floor_macs, self.macs)}) and "
            f"{self.floor_params:,} of {self.params:,} parameters ({_percent(self.floor_params, self.params)}) stay."
        )
        return "\n".join(lines)

    __repr__ = __str__  # for notebooks


def _described(site: Site, name: str, required: frozenset[str]) -> str:
    if name != site.name:
        return f"shares the mask of '{site.name}'"
    floor = ", keeps at least 1 channel (only path to the output)" if site.name in required else ""
    kind = "" if site.kind == "activated" else f", {KIND_WORDS[site.kind]}"
    return f"site, {site.activation}{kind}{floor}"


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f}%" if whole else "-"


def inspect(
    model: nn.Module,
    example: ExampleLike,
    *,
    include: Globs = None,
    exclude: Globs = None,
    site_kinds: Iterable[str] = KINDS,
) -> Inspection:
    """Trace `model` on `example` and return which BatchNorms can be pruned, and why the others cannot.

    Args:
        model: Any network. It is not changed.
        example: An input of the model: a tensor, a tuple of arguments, or (args, kwargs).
        include: Names or glob patterns of BatchNorms to prune.
        exclude: Names or glob patterns of BatchNorms not to prune.
        site_kinds: Kinds of sites in addition to BatchNorms followed by an activation: "sum" (BatchNorms that are added
            before an activation), "linear" (BatchNorms without an activation), "stream" (all BatchNorms that write to a
            residual stream). The default is the same as with a target; with a strength, it is `("sum",)`.
    """
    graph = read_graph(model, example, include=include, exclude=exclude, kinds=site_kinds)
    floor = make_plan(graph, model, floor_masks(graph))
    return Inspection(
        sites=graph.sites,
        frozen=graph.frozen,
        required=required_sites(graph),
        macs=floor.dense_macs,
        params=floor.dense_params,
        floor_macs=floor.macs,
        floor_params=floor.params,
        unknown_operators=graph.unknown,
        unreached=graph.unreached,
        size_dependence=graph.size_dependence,
        available=graph.further_kinds(),
    )
