"""The channels of a masked network as a budget sees them: scores, weights of the sparsity loss, regrowing."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from softprune.graph import ChannelGraph
from softprune.graph.modules import by_filter
from softprune.masks import SoftMasks, alive_probability
from softprune.rng import channel_words

SAFE = 0.35
"""The predicted score below which the sparsity loss of a channel that is to be kept weakens; it is 0 at half of it
and turns around below."""
_LOOK_AHEAD = 2.0
"""The intervals between updates over which a score is extrapolated, since momentum outlasts a change of the loss."""
_REGROWN_SCALE = 0.1
"""The scale of a regrown channel: small, so that it disturbs little, and clearly alive."""

BySite = dict[str, Tensor]
"""Masks, scores or factors: one entry per channel, by site."""


class ChannelState:
    """Reads and writes what a budget needs of the channels of a network's sites, which have :class:`SoftMasks`."""

    def __init__(self, graph: ChannelGraph, network: nn.Module) -> None:
        self.graph, self.network = graph, network
        self.widths = {site.name: site.width for site in graph.sites}
        self._scales: dict[str, tuple[Tensor, Tensor]] = {}
        masks: Any = network.get_submodule(graph.sites[0].name).masks
        assert isinstance(masks, SoftMasks)
        self.masks: SoftMasks = masks
        self.masks.limit()

    @property
    def in_force(self) -> bool:
        """Whether the allowed channels are in force (reads the device)."""
        return bool(present(self.masks.in_force))

    @in_force.setter
    def in_force(self, value: bool) -> None:
        present(self.masks.in_force).fill_(value)

    @property
    def allowed(self) -> BySite:
        """Copies of the channels that are allowed, by site."""
        return self.masks.by_site(present(self.masks.allowed).to("cpu", copy=True))

    @allowed.setter
    def allowed(self, masks: Mapping[str, Tensor]) -> None:
        present(self.masks.allowed).copy_(self.masks.row(masks))

    @property
    def weights(self) -> BySite:
        """Copies of the factors of the sparsity loss, by site."""
        return self.masks.by_site(present(self.masks.weight).to("cpu", copy=True))

    @weights.setter
    def weights(self, weights: Mapping[str, Tensor]) -> None:
        present(self.masks.weight).copy_(self.masks.row(weights))

    @torch.no_grad()
    def scores(self, network: nn.Module | None = None) -> BySite:
        """Return how far each channel is from being dropped: 1 when untrained, 0 and below when dead.

        It is the log-odds of being alive above SCP's threshold, in units of an untrained channel's, so that sites
        with different activations can be compared.
        """
        alive = self.masks.by_site(self.masks.alive(network).double().cpu())
        dead = self.masks.by_site(self.masks.dead(network).cpu())
        found = {}
        for site in self.graph.sites:
            threshold, untrained = self._scale(site.activation)
            above = _log_odds(alive[site.name]) - threshold
            # The method's own rule decides, to the last bit.
            above = torch.where(dead[site.name], above.clamp(max=0.0), above.clamp(min=1e-9))
            found[site.name] = above / untrained
        return found

    def _scale(self, activation: str) -> tuple[Tensor, Tensor]:
        """Return the log-odds of SCP's threshold, and those of an untrained channel above it."""
        if activation not in self._scales:
            one, config = torch.ones(1, dtype=torch.float64), self.masks.config
            threshold = _log_odds((1 - config.c) * one)
            alive = alive_probability(0 * one, one, config, activation)
            self._scales[activation] = (threshold, _log_odds(alive) - threshold)
        return self._scales[activation]

    def is_trained(self) -> bool:
        """Return whether channels of one site differ, which they do not when a network is made."""
        return any(bool(score.max() - score.min() > 1e-6) for score in self.scores().values())

    def protection(
        self, scores: BySite, before: BySite | None, keep: BySite, most: float = 1.0
    ) -> tuple[BySite, float]:
        """Return the factors that keep the channels of `keep` from dying, and the share of them that would.

        `before` are the scores at the last update, for the speed at which they fall; `most` bounds the factors.
        """
        factors, endangered, kept = {}, 0, 0
        for name, score in scores.items():
            falls = torch.zeros_like(score) if before is None else (score - before[name]).clamp(max=0.0)
            predicted = score + _LOOK_AHEAD * falls
            factor = (2 * predicted / SAFE - 1).clamp(-most, most)
            factors[name] = torch.where(keep[name], factor, 1.0).float()
            endangered += int((keep[name] & (factor < 0)).sum())
            kept += int(keep[name].sum())
        return factors, endangered / max(kept, 1)

    @torch.no_grad()
    def regrow(self, masks: BySite, step: int) -> int:
        """Bring the channels in `masks` back to life: a small scale, no shift, a fresh filter. Return their number.

        The filter is a function of seed, step, site and channel, so that a resumed run and every process draw the
        same one.
        """
        count = 0
        for number, site in enumerate(self.graph.sites):
            chosen = masks[site.name]
            if not chosen.any():
                continue
            for member in site.members:
                bn = self.network.get_submodule(member)
                assert isinstance(bn, _BatchNorm)
                place = chosen.to(bn.weight.device)
                bn.weight[place], bn.bias[place] = _REGROWN_SCALE, 0.0
                self._refill_filters(member, place, (self.masks.clock.seed, step, number))
            count += int(chosen.sum())
        return count

    def _refill_filters(self, name: str, place: Tensor, key: tuple[int, int, int]) -> None:
        feeder = self.graph.feeder(name)
        if feeder is None:
            return
        layer: Any = self.network.get_submodule(feeder)
        seed, step, number = key
        word = int(channel_words(seed + step, number, 1)[0]) & 0x7FFFFFFF
        noise = torch.randn(layer.weight.shape, generator=torch.Generator().manual_seed(word)).to(layer.weight)
        rows = by_filter(layer, layer.weight)
        place = place.view(rows.shape[:2])
        others = rows[~place] if bool((~place).any()) else rows
        rows[place] = (by_filter(layer, noise) * others.square().mean().sqrt())[place]


def _log_odds(probability: Tensor) -> Tensor:
    return torch.logit(probability.clamp(1e-30, 1 - 1e-12))


def present(tensor: Tensor | None) -> Tensor:
    """Return a tensor that a gate with a budget always has."""
    assert tensor is not None
    return tensor
