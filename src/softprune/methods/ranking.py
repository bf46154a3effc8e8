"""Methods that rank channels by a score, decide at certain moments and keep the decision until the next."""

import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor, nn

from softprune.budget import Limit, TableLike
from softprune.errors import ConfigError, few_of, is_number
from softprune.graph import ChannelGraph, ExampleLike, Site
from softprune.graph.modules import by_filter
from softprune.masks import FixedGate, Gate, fill_to_multiple
from softprune.masks.gates import keep_common
from softprune.methods.base import GraphReader, Pruner
from softprune.methods.optimizer_hooks import all_decayed
from softprune.methods.options import PrunerOptions, RankingOptions, check_has_target
from softprune.target import TargetLike

Ratio = float | Mapping[str, float]
"""The share of channels to remove: one for all sites, or by glob on their names (sites without one stay whole)."""


def drop_lowest(scores: Tensor, count: int) -> Tensor:
    """Return booleans, False at the `count` lowest scores; among equals the later ones are dropped first."""
    order = torch.argsort(scores, descending=True, stable=True)
    keep = torch.ones_like(scores, dtype=torch.bool)
    keep[order[len(scores) - min(max(count, 0), len(scores)) :]] = False
    return keep


def fill_up(keep: Tensor, scores: Tensor, round_to: int, floor: int) -> Tensor:
    """Add the best dropped channels to `keep` until `floor` and a multiple of `round_to` are reached."""
    if round_to == 1 and floor == 0:
        return keep
    scores = scores.double()
    span = scores.max() - scores.min()
    # fill_to_multiple expects scores of at most 1.
    scaled = torch.where(span > 0, (scores - scores.min()) / span, torch.zeros_like(scores))
    return fill_to_multiple(keep, scaled, round_to, floor)


def check_ratio(value: object, name: str = "ratio") -> float:
    """Return `value` as a share of channels, or raise a ConfigError."""
    if not is_number(value) or not 0 <= value < 1:
        raise ConfigError(f"`{name}` is the share of channels to remove, from 0 to below 1. Got {value!r}.")
    return float(value)


def ratio_or_target(name: str, ratio: Ratio | None, default: float, options: RankingOptions) -> Ratio:
    """Return the ratio that is given, or the default; raise a ConfigError if there is a target beside it."""
    target = options.get("target")
    if ratio is not None and target is not None:
        raise ConfigError(
            f"`{name}` and `target` exclude each other: a target decides how much is removed. "
            f"Got {name} = {ratio!r} and target = {target!r}; give one of them."
        )
    return default if ratio is None else ratio


def ratio_per_site(ratio: Ratio, names: Sequence[str], name: str = "ratio") -> dict[str, float]:
    """Return the share of every site. Of several matching globs the last one counts."""
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


def within_site(scores: Tensor) -> Tensor:
    """Return scores by rank within the site, from 1 down: a cut over all sites then removes the same share of each."""
    order = torch.argsort(scores, descending=True, stable=True)
    ranks = torch.empty(len(scores), dtype=torch.float64)
    ranks[order.cpu()] = 1 - torch.arange(len(scores), dtype=torch.float64) / len(scores)
    return ranks


class StoredPruner(Pruner):
    """A pruner whose gates hold their masks; they change in place, so that a captured CUDA graph sees the change."""

    def __init__(
        self,
        model: nn.Module,
        example: ExampleLike,
        *,
        strength: float = 0.0,
        target: TargetLike | None = None,
        latency_batch: int | None = None,
        latency_table: TableLike | None = None,
        **options: Unpack[PrunerOptions],
    ) -> None:
        check_has_target(target, latency_batch=latency_batch, latency_table=latency_table)
        super().__init__(model, example, strength=strength, **options)
        if target is None:
            return
        try:
            self._limit = Limit(target, self._prunable(), batch=latency_batch, table=latency_table)
        except BaseException:
            self.detach()
            raise

    @torch.no_grad()
    def _meet_target(self, network: nn.Module, scores: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the masks of the highest scores that meet the target."""
        assert self._limit is not None
        masks = self._limit.masks(self._fold_gates(network), scores)
        return {name: mask.to(self._stored(name).device) for name, mask in masks.items()}

    def _gate(self, number: int, site: Site) -> Gate:
        return FixedGate(torch.ones(site.width, dtype=torch.bool), masked_training=True)

    def _stored(self, name: str) -> Tensor:
        gate = self.norms[name].gate
        assert isinstance(gate, FixedGate)
        return gate.mask

    @torch.no_grad()
    def _keep_coupled(self, masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return masks in which every group of coupled sites keeps enough channels in common.

        Channels that most sites of the group keep come first, then those with the largest scale.
        """
        made, sites = dict(masks), {site.name: site for site in self.sites}
        for group in self.coupled:
            scales = {name: self.norms[name].weight.abs() for name in group}
            votes = torch.stack([made[name] for name in group]).sum(0)
            chances = [votes + scale / (1 + scale.max()) for scale in scales.values()]
            common = keep_common(chances, self.floor(sites[group[0]]))
            made |= {name: self._filled(sites[name], made[name] | common, scales[name]) for name in group}
        return made

    @torch.no_grad()
    def _store(self, masks: Mapping[str, Tensor]) -> None:
        for name, mask in masks.items():
            self._stored(name).copy_(mask)

    def _hard(self, name: str, network: nn.Module) -> Tensor:
        return self._stored(name).to(self._norms_in(name, network).weight.device)

    def _without_lowest(self, site: Site, scores: Tensor, count: int) -> Tensor:
        """Return the channels of `site` that are kept when the `count` of lowest score are dropped."""
        return self._filled(site, drop_lowest(scores, count), scores)

    def _filled(self, site: Site, keep: Tensor, scores: Tensor) -> Tensor:
        """Return `keep`, filled up to the site's floor and to a multiple of `round_to`."""
        return fill_up(keep, scores, self.round_to, self.floor(site))

    def state_dict(self) -> dict[str, Any]:
        stored = {site.name: self._stored(site.name).clone() for site in self.sites}
        return {**super().state_dict(), "stored": stored}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._store(state["stored"])


class FilterPruner(StoredPruner):
    """A method of SFP's, FPGM's or L1's kind: its sites are fed by filters, and all parameters decay."""

    every_norm: ClassVar[bool] = True
    """Whether BatchNorms that no activation follows, such as the last of a residual branch, are sites too."""
    feeders: dict[str, str]
    """The layer whose filters feed each site."""

    def _read(self, read: GraphReader) -> ChannelGraph:
        graph = read(every_norm=self.every_norm)
        feeders = {site.name: graph.feeder(site.name) for site in graph.sites}
        self.feeders = {name: feeder for name, feeder in feeders.items() if feeder is not None}
        without = "it does not read the filters of one layer alone, channel by channel"
        return graph.only({name: without for name, feeder in feeders.items() if feeder is None})

    def _layers(self, network: nn.Module) -> dict[str, Any]:
        """Return the layer that feeds each site."""
        return {site.name: network.get_submodule(self.feeders[site.name]) for site in self.sites}

    def _filters(self, network: nn.Module) -> dict[str, Tensor]:
        """Return the filters of every site, one row each."""
        layers = self._layers(network).items()
        return {name: by_filter(layer, layer.weight.detach()).flatten(2).flatten(0, 1) for name, layer in layers}

    def parameter_groups(self, weight_decay: float = 0.0) -> list[dict[str, Any]]:
        return all_decayed(self.model, weight_decay)


class OneShotPruner(StoredPruner):
    """A method that trains the whole network and decides once, afterwards.

    A target replaces the ratio: the channels with the lowest scores are removed until it is met.

    Until :meth:`decide`, the model trains and evaluates whole, while `masks()`, `plan()`, `summary()` and `compact()`
    show what a decision now would be. From :meth:`decide` on, the model trains and evaluates with the final masks.
    """

    _final = False

    def _choose(self, network: nn.Module) -> dict[str, Tensor]:
        """Return the decision, from the weights of `network`."""
        raise NotImplementedError

    def _ranking(self, network: nn.Module) -> dict[str, Tensor]:
        """Return scores that can be compared over all sites, for a decision that meets a target."""
        raise NotImplementedError

    @property
    def decided(self) -> bool:
        return self._final

    def decide(self) -> dict[str, Tensor]:
        if not self._final:
            self._store(self.masks())
            self._final = True
        return self.masks()

    def masks(self, model: nn.Module | None = None) -> dict[str, Tensor]:
        if self._final:
            return super().masks(model)
        self._masked_model.check_in_place()
        with torch.no_grad():
            network = self._network_of(model)
            if self._limit is not None:
                return self._meet_target(network, self._ranking(network))
            return self._keep_coupled(self._choose(network))

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "decided": self._final}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._final = bool(state["decided"])
