"""The sites of a run in terms of its dense network, also after the network was cut in mid-training."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from softprune.methods import Pruner
from softprune.plan import PrunePlan


@dataclass
class _Site:
    activation: str
    live: list[int]
    """Channels of the dense BatchNorm that the network still has."""
    beta: list[float]
    gamma: list[float]
    """Per dense channel; those cut away keep the values that they were cut with."""


class SiteHistory:
    """Remembers which dense channels each masked BatchNorm still has, and what became of the others."""

    def __init__(self) -> None:
        self._sites: dict[str, _Site] = {}

    @classmethod
    def of(cls, pruner: Pruner) -> "SiteHistory":
        """The book of a network that was never cut."""
        book = cls()
        for site in pruner.sites:
            width = site.width
            zeros = [0.0] * width
            book._sites[site.name] = _Site(site.activation, list(range(width)), zeros, list(zeros))
        return book

    def dense_masks(self, masks: dict[str, Tensor]) -> dict[str, Tensor]:
        """The current network's masks as masks of the dense network: what was cut is False."""
        dense = {}
        for name, site in self._sites.items():
            mask = torch.zeros(len(site.beta), dtype=torch.bool)
            if site.live:
                kept = masks[name].cpu() if name in masks else torch.ones(len(site.live), dtype=torch.bool)
                mask[torch.tensor(site.live)] = kept
            dense[name] = mask
        return dense

    def note(self, network: nn.Module) -> None:
        """Write down shifts and scales of the channels that the network has now."""
        modules = dict(network.named_modules())
        for name, site in self._sites.items():
            if not site.live:
                continue
            bn = modules[name]
            assert isinstance(bn.weight, Tensor)
            assert isinstance(bn.bias, Tensor)
            for channel, beta, gamma in zip(site.live, bn.bias.tolist(), bn.weight.tolist(), strict=True):
                site.beta[channel], site.gamma[channel] = beta, gamma

    def cut(self, plan: PrunePlan) -> None:
        """The network was cut by ``plan``."""
        for name, site in self._sites.items():
            if site.live and name in plan.modules:
                module = plan.modules[name]
                site.live = [] if module.void else [site.live[index] for index in module.outputs]

    def records(self, masks: dict[str, Tensor]) -> list[dict[str, Any]]:
        """The entries of result.json."""
        dense = self.dense_masks(masks)
        return [
            {
                "name": name,
                "activation": site.activation,
                "width": len(site.beta),
                "kept": int(dense[name].sum()),
                "beta": site.beta,
                "gamma": site.gamma,
                "keep": dense[name].tolist(),
            }
            for name, site in self._sites.items()
        ]

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {name: vars(site) for name, site in self._sites.items()}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "SiteHistory":
        """The inverse of :meth:`state_dict`."""
        book = cls()
        book._sites = {name: _Site(**values) for name, values in state.items()}
        return book
