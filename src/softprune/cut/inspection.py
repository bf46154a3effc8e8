"""What can be pruned in a network, before any training: sites, frozen BatchNorms with reasons, what is left at best."""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from softprune.cut import floor_masks, make_plan, required_sites
from softprune.cut.selection import Globs, read_graph
from softprune.errors import first_few
from softprune.graph import ExampleLike, Frozen, Site
from softprune.graph.sites import DEFAULT_KINDS

NO_BATCHNORM = (
    "This network has no BatchNorm, and softprune prunes by BatchNorms: their shift and scale say how likely a channel "
    "is dead. Put BatchNorms between convolutions and activations, or use a variant of the network that has them."
)
KIND_WORDS = {"sum": "of a sum of BatchNorms", "linear": "without an activation", "stream": "of a residual stream"}


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
    """Operators without a rule that freeze channels -> a place where they stand."""
    unreached: tuple[str, ...]
    """Parameters that the example does not lead to; what they would read may be cut away."""
    available: dict[str, int]
    """Kinds of sites that were not requested -> frozen BatchNorms that they would mask."""

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
            lines.append("softprune.graph.add_operator gives an operator of your own a rule (docs/sites.md)")
        if self.unreached:
            shown = first_few(self.unreached)
            lines.append(f"not reached by the example, so that what they read may be cut away: {shown}")
        if self.available:
            more = ", ".join(f'"{kind}" masks {count}' for kind, count in self.available.items())
            lines.append(f"of the frozen BatchNorms site_kinds={more} more")
        channels = sum(site.width for site in self.sites)
        lines.append(
            f"{len(self.sites)} sites with {channels:,} channels, {len(self.frozen)} frozen. "
            f"At best {self.floor_macs:,} of {self.macs:,} MACs ({_percent(self.floor_macs, self.macs)}) and "
            f"{self.floor_params:,} of {self.params:,} parameters ({_percent(self.floor_params, self.params)}) stay."
        )
        return "\n".join(lines)

    __repr__ = __str__  # what a notebook shows


def _described(site: Site, name: str, required: frozenset[str]) -> str:
    if name != site.name:
        return f"shares the mask of '{site.name}'"
    floor = ", at least 1 channel stays (the way to an output)" if site.name in required else ""
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
    site_kinds: Iterable[str] = DEFAULT_KINDS,
) -> Inspection:
    """Read `model` through one call on `example` and return what softprune could prune of it.

    Args:
        model: Any network. It is left exactly as it was.
        example: What the model is called with: a tensor, a tuple of arguments, or (args, kwargs).
        include: Only these BatchNorms, by name with wildcards.
        exclude: Not these.
        site_kinds: Kinds of sites beside BatchNorms that an activation reads: "sum" (BatchNorms that are added and then
            activated), "linear" (BatchNorms without an activation), "stream" (all BatchNorms that write one residual
            stream). Pass what you will pass to the pruner.
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
        available=graph.further_kinds(),
    )
