"""A masked model that can be cut: masks, plan, a summary that prints, and the verified compact network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from softprune.budget import PrunableNetwork
from softprune.cut import Certificate, PrunePlan, cut_and_verify, make_plan, without_gc
from softprune.graph import ChannelGraph, Site
from softprune.graph.example import Example
from softprune.log import get_logger
from softprune.masks import HookOwner, MaskedBatchNorm, is_masked, norms_of
from softprune.methods.masked_model import MaskedModel
from softprune.methods.options import check_cut, check_values

logger = get_logger(__name__)


@dataclass(frozen=True)
class SiteSummary:
    """One masked BatchNorm."""

    name: str
    activation: str
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


class CuttableModel(HookOwner):
    """The part of a pruner that turns its masks into a plan and a compact network."""

    penalised: ClassVar[bool] = False
    """Whether the method adds ``strength`` times a penalty to the loss."""
    model: nn.Module
    example: Example
    graph: ChannelGraph
    round_to: int
    min_channels: int
    required: frozenset[str]
    """Sites that must not become empty: every path to an output passes through them."""
    coupled: tuple[tuple[str, ...], ...]
    """Groups of sites of which only the channels that all of them keep remain."""
    certificate: Certificate | None
    """How close masked and compact network were at the last :meth:`compact`."""
    _masked_model: MaskedModel
    norms: dict[str, MaskedBatchNorm]
    """The masked BatchNorm of every site."""

    def __repr__(self) -> str:
        channels = sum(site.width for site in self.sites)
        return f"{type(self).__name__}({type(self.model).__name__}, {len(self.sites)} sites, {channels:,} channels)"

    @property
    def sites(self) -> tuple[Site, ...]:
        """The masked BatchNorms."""
        return self.graph.sites

    def floor(self, site: Site) -> int:
        """Return the fewest channels that `site` keeps."""
        is_required = any(name in self.required for name in (site.name, *self.coupled_to(site.name)))
        return min(max(self.min_channels, int(is_required)), site.width)

    def coupled_to(self, name: str) -> tuple[str, ...]:
        """Return the other sites of the coupled group that site `name` is in; empty if it is in none."""
        group = next((group for group in self.coupled if name in group), ())
        return tuple(other for other in group if other != name)

    def _prunable(self) -> PrunableNetwork:
        """Return the network with the rules of its cuts, for a budget."""
        floors = {site.name: self.floor(site) for site in self.sites}
        return PrunableNetwork(self.graph, self.model, self.example, floors, self.coupled, self.round_to)

    def _fold_gates(self, network: nn.Module) -> nn.Module:
        """Return `network`, or a copy, whose plain BatchNorms compute what the masked ones do on kept channels."""
        return network

    def masks(self, model: nn.Module | None = None) -> dict[str, Tensor]:
        """Return the hard mask of every site now, True where a channel is kept. `model`: an EMA or other copy."""
        self._masked_model.check_in_place()
        network = self._network_of(model)
        return {name: self._hard(name, network).clone() for name in self.norms}

    def _network_of(self, model: nn.Module | None) -> nn.Module:
        return self.model if model is None else self._masked_model.unwrap(model)

    def _hard(self, name: str, network: nn.Module) -> Tensor:
        """Return the decision of the gate of site `name` on the BatchNorm that `network`, ours or a copy, has there."""
        return self.norms[name].gate.hard(self._norms_in(name, network))

    def _norms_in(self, name: str, network: nn.Module) -> _BatchNorm:
        """Return what the gate of site `name` takes: the BatchNorms that `network`, ours or a copy, has there."""
        site = next(site for site in self.sites if site.name == name)
        return norms_of(network, name, site.points, site.entering, site.slopes)

    def plan(self, model: nn.Module | None = None, *, round_to: int | None = None, gathers: bool = True) -> PrunePlan:
        """Return what every module would keep if the network were cut now. Arguments as in :meth:`compact`."""
        return self._plan_cut(model, round_to, gathers)[0]

    def _plan_cut(
        self, model: nn.Module | None, round_to: int | None, gathers: bool
    ) -> tuple[PrunePlan, nn.Module, dict[str, Tensor]]:
        """Return the plan of a cut, the network that it starts from, and the masks."""
        self._masked_model.check_unchanged()
        network = self._network_of(model)
        check_values(network)
        check_cut(round_to, gathers)
        network, masks = self._fold_gates(network), self.masks(model)
        multiple = self.round_to if round_to is None else int(round_to)
        return make_plan(self.graph, network, masks, round_to=multiple, gathers=gathers), network, masks

    def summary(self) -> Summary:
        """Return width and kept channels per site, and the totals before and after. Prints as a table."""
        plan, floors, rounded = self.plan(), self._prunable().floors, self._dead_kept(self.model)
        kept = {name: int(mask.sum()) for name, mask in self.masks().items()}
        return Summary(
            sites=tuple(
                SiteSummary(
                    name=site.name,
                    activation=site.activation,
                    width=site.width,
                    kept=kept[site.name],
                    floor=floors[site.name],
                    rounded=rounded.get(site.name, 0),
                    left=len(plan.modules[site.name].outputs) if site.name in plan.modules else site.width,
                )
                for site in self.sites
            ),
            channels=sum(kept.values()),
            dense_channels=sum(site.width for site in self.sites),
            macs=plan.macs,
            dense_macs=plan.dense_macs,
            params=plan.params,
            dense_params=plan.dense_params,
            filled=plan.kept_for_shape,
        )

    def _dead_kept(self, network: nn.Module) -> dict[str, int]:
        """Return, by site, the number of dead channels that a multiple or a floor keeps."""
        found = {}
        for name, bn in self.norms.items():
            here = self._norms_in(name, network)
            count = int((self._hard(name, network) & bn.gate.dead(here)).sum())
            if count:
                found[name] = count
        return found

    @torch.inference_mode(False)
    @without_gc()
    def compact(
        self, model: nn.Module | None = None, *, round_to: int | None = None, gathers: bool = True
    ) -> nn.Module:
        """Return a new module of the same class without the dead channels, verified equal to the masked model.

        The model itself is not changed. A VerificationError is raised, and there is no result, if the cut would not
        be exact. The arguments change how much is removed, never what is computed.

        Args:
            model: A copy of the trained network, an EMA for example, whose weights are cut instead.
            round_to: Fill convolution outputs, and what BatchNorms read of a stream, up to this multiple with zero
                channels; None: the pruner's own. Parts of a split and dead branches are not filled.
            gathers: Whether layers may read a part of a shared stream (a residual sum, a concatenation) through an
                index. False reads the whole stream: fewer, larger operations, which small batches may prefer.
        """
        if not any(is_masked(module) for module in self._network_of(model).modules()):
            logger.warning(
                "softprune: `model` is a copy without masks, so evaluating it has not shown what is cut: evaluate the "
                "compact network, or copy the network (for an EMA) after the pruner is made"
            )
        plan, network, masks = self._plan_cut(model, round_to, gathers)
        compact, self.certificate = cut_and_verify(plan, network, masks, self.example)
        logger.info("%s", self.certificate)
        if plan.macs == 0:
            logger.warning(
                "softprune: every path to an output is dead and the network is a constant; %s",
                "lower the strength" if self.penalised else "prune less",
            )
        if plan.macs == plan.dense_macs and plan.params >= plan.dense_params:
            logger.warning(
                "softprune: %s: the compact network is as large as the dense one", self._why_whole(network, masks)
            )
        return compact

    def _why_whole(self, network: nn.Module, masks: dict[str, Tensor]) -> str:
        if not all(mask.all() for mask in masks.values()):
            return "multiples, or streams that are read whole, keep every dead channel"
        if self._dead_kept(network):
            return f"round_to={self.round_to} and min_channels={self.min_channels} keep every dead channel"
        if self.penalised:
            return "no channel is dead (train longer, or with a larger strength or learning rate)"
        return "no channel is dropped"
