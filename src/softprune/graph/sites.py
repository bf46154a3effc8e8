"""Which BatchNorms can be masked: those whose every reader is an activation that keeps zero at zero."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from softprune.graph.builder import GraphBuilder
from softprune.graph.following import activation_after
from softprune.graph.groups import Entering, find_groups
from softprune.graph.modules import is_known_batch_norm

KINDS = ("sum", "linear", "stream")
"""Kinds of sites beside ``"activated"``, a BatchNorm that an activation reads; see :mod:`softprune.graph.groups`."""
DEFAULT_KINDS = ("sum",)


@dataclass(frozen=True)
class Site:
    """One or several BatchNorms that share one mask, and the activation that reads them."""

    name: str
    """The BatchNorm, the first in order of execution where there are several."""
    width: int
    activation: str
    points: tuple[tuple[str, ...], ...] = ()
    """BatchNorms that are added up before one activation each; empty where the site is one BatchNorm."""
    kind: str = "activated"
    entering: Entering = ()
    """BatchNorms of narrower streams that are added to this one between zero channels. They have masks of their own."""

    @property
    def members(self) -> tuple[str, ...]:
        """The BatchNorms that carry the mask."""
        return tuple(name for point in self.points for name in point) or (self.name,)


@dataclass(frozen=True)
class Frozen:
    """A BatchNorm that stays whole, and why."""

    name: str
    width: int
    reason: str
    maskable: bool = False
    """Whether only what follows it speaks against it: a method that does not ask about the activation may mask it."""


def find_sites(builder: GraphBuilder) -> tuple[tuple[Site, ...], tuple[Frozen, ...]]:
    """Return every BatchNorm of the model, as a site or frozen with its reason, in the order of the model."""
    sites: list[Site] = []
    frozen: list[Frozen] = []
    for name, module in builder.model.named_modules():
        known = is_known_batch_norm(type(module))
        if not known and not isinstance(module, _BatchNorm) and not _named_batch_norm(module):
            continue
        width = int(getattr(module, "num_features", 0))
        unusable = _unusable_because(builder, name, module, known)
        reason = unusable or _unheard_because(builder, name)
        if reason is None:
            activation = activation_after(builder.norm_nodes[name][0])[0]
            assert activation is not None
            sites.append(Site(name, width, activation))
        else:
            maskable = unusable is None and _bound_because(builder, name) is None
            frozen.append(Frozen(name, width, reason, maskable))
    return tuple(sites), tuple(frozen)


def _named_batch_norm(module: nn.Module) -> bool:
    """Whether an unknown class calls itself BatchNorm and has tensors of its own: a module around one has none."""
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return "BatchNorm" in type(module).__name__ and (bool(own) or next(module.children(), None) is None)


def find_grouped_sites(builder: GraphBuilder, sites: Sequence[Site], frozen: Sequence[Frozen]) -> tuple[Site, ...]:
    """Return the sites of other kinds that BatchNorms could form; see :meth:`ChannelGraph.with_kinds`."""
    single = {site.name for site in sites}
    usable = single | {norm.name for norm in frozen if norm.maskable}
    widths = {name: len(norm.outputs) for name, norm in builder.norms.items() if name in usable and len(norm.uses) == 1}
    return tuple(
        Site(group.points[0][0], widths[group.points[0][0]], group.activation, group.points, group.kind, group.entering)
        for group in find_groups(builder.ops, len(builder.table), widths, single)
    )


def _unusable_because(builder: GraphBuilder, name: str, module: nn.Module, known: bool) -> str | None:
    """Why the module cannot carry a mask at all."""
    if not known:
        return f"{type(module).__name__} is not among the BatchNorm classes that softprune knows"
    if name in builder.shared_norms:
        return "its parameters are shared with another module"
    if name not in builder.norms:
        return "the forward pass does not call it as a whole, or not at all"
    if getattr(module, "weight", None) is None or getattr(module, "bias", None) is None:
        return "it has no learned scale and shift (affine=False)"
    if not all(parameter.requires_grad for parameter in module.parameters(recurse=False)):
        return "its scale and shift do not both train (requires_grad=False)"
    if not getattr(module, "track_running_stats", True):
        return "it keeps no running statistics, so its output in evaluation depends on the batch"
    return None


def _unheard_because(builder: GraphBuilder, name: str) -> str | None:
    """Why masking this BatchNorm would have no effect, by what follows or because nothing can be cut."""
    names = {activation_after(node) for node in builder.norm_nodes[name]}
    for activation, reason in sorted(names, key=str):
        if activation is None:
            return reason
    if len(names) > 1:
        return "different activations read it in its different uses"
    return _bound_because(builder, name)


def _bound_because(builder: GraphBuilder, name: str) -> str | None:
    """Why none of its channels can be cut."""
    reason = builder.table.pinned_because(builder.norms[name].outputs)
    return None if reason is None else f"its channels cannot be cut: {reason}"
