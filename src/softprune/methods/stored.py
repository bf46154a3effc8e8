"""Methods that decide at certain moments and hold on to the decision until the next."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from softprune.graph import Site
from softprune.masks import FixedGate, Gate
from softprune.masks.gates import keep_common
from softprune.methods.base import Pruner
from softprune.methods.ranking import fit


class StoredPruner(Pruner):
    """A pruner whose gates hold their masks; they change in place, so that a captured CUDA graph sees it."""

    def _gate(self, number: int, site: Site) -> Gate:
        return FixedGate(torch.ones(site.width, dtype=torch.bool), masked_training=True)

    def _stored(self, name: str) -> Tensor:
        gate = self._masked[name].gate
        assert isinstance(gate, FixedGate)
        return gate.mask

    @torch.no_grad()
    def _in_lines(self, masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The masks of all sites so that of a line, of which only what all of its sites keep is left, enough is.

        What most of them keep comes first, then what has the largest scale.
        """
        made, sites = dict(masks), {site.name: site for site in self.sites}
        for line in self.lines:
            scales = {name: self._masked[name].weight.abs() for name in line}
            votes = torch.stack([made[name] for name in line]).sum(0)
            chances = [votes + scale / (1 + scale.max()) for scale in scales.values()]
            common = keep_common(chances, self.floor(sites[line[0]]))
            made |= {name: self._fitted(sites[name], made[name] | common, scales[name]) for name in line}
        return made

    @torch.no_grad()
    def _store(self, masks: Mapping[str, Tensor]) -> None:
        for name, mask in masks.items():
            self._stored(name).copy_(mask)

    def masks(self, model: nn.Module | None = None) -> dict[str, Tensor]:
        self._check_sites()
        if model is not None:
            self._twin(model)
        return {site.name: self._stored(site.name).clone() for site in self.sites}

    def _fitted(self, site: Site, keep: Tensor, scores: Tensor) -> Tensor:
        """`keep` brought to the site's floor and to a multiple of `round_to`."""
        return fit(keep, scores, self.round_to, self.floor(site))

    def state_dict(self) -> dict[str, Any]:
        stored = {site.name: self._stored(site.name).clone() for site in self.sites}
        return {**super().state_dict(), "stored": stored}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._store(state["stored"])


class OneShotPruner(StoredPruner):
    """A method that trains the whole network and decides once, afterwards.

    Until :meth:`decide`, the model trains and evaluates whole, while `masks()`, `plan()`, `summary()` and `compact()`
    say what a decision now would be. From :meth:`decide` on, the model trains and evaluates with the masks settled
    then.
    """

    _settled = False

    def _choose(self, network: nn.Module) -> dict[str, Tensor]:
        """The decision, from the weights of `network`."""
        raise NotImplementedError

    @property
    def decided(self) -> bool:
        return self._settled

    def decide(self) -> dict[str, Tensor]:
        if not self._settled:
            self._store(self.masks())
            self._settled = True
        return self.masks()

    def masks(self, model: nn.Module | None = None) -> dict[str, Tensor]:
        if self._settled:
            return super().masks(model)
        self._check_sites()
        with torch.no_grad():
            return self._in_lines(self._choose(self.model if model is None else self._twin(model)))

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "decided": self._settled}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._settled = bool(state["decided"])
