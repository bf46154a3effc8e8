"""Sparse Structure Selection: a factor on every structure, pushed to exactly zero by a proximal step."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from softprune.errors import ConfigError
from softprune.graph import ChannelGraph, ExampleLike, Site
from softprune.masks import AffineGate, FixedGate, Gate
from softprune.methods.affine import AffinePruner
from softprune.methods.base import RoundTo
from softprune.methods.branches import Branch, residual_branches
from softprune.methods.extras import Extra, paces_of, take_gradients
from softprune.methods.ranking import fit
from softprune.selection import Globs, read_graph

Structure = Literal["auto", "block", "channel"]


@torch.no_grad()
def proximal_step_(
    factor: Tensor,
    velocity: Tensor,
    gradient: Tensor,
    rate: float | Tensor,
    momentum: float,
    strength: float | Tensor,
) -> None:
    """One accelerated proximal step with non-negative factors, in place.

    z = soft(f - rate * gradient, rate * strength); v = z - f + momentum * v; f = max(0, z + momentum * v)
    """
    moved = factor - rate * gradient
    shrunk = torch.sign(moved) * torch.clamp(moved.abs() - rate * strength, min=0.0)
    velocity.mul_(momentum).add_(shrunk - factor)
    factor.copy_(torch.clamp(shrunk + momentum * velocity, min=0.0))


class _FactorGate(AffineGate):
    """Multiplies a BatchNorm's output by factors: one per channel, or one for all of them."""

    def __init__(self, extra: Extra, width: int, round_to: int, floor: int) -> None:
        super().__init__(torch.ones(width, dtype=torch.bool))
        self.extra, self.round_to, self.floor = extra, round_to, floor

    def affine(self, bn: _BatchNorm) -> tuple[Tensor, Tensor]:
        return self.extra.value * bn.weight, self.extra.value * bn.bias

    def masked_affine(self, bn: _BatchNorm) -> tuple[Tensor, Tensor]:
        # A factor of zero has silenced the channel already, and must go on having a gradient: it may come back.
        weight, bias = self.affine(bn)
        return weight.to(bn.weight.dtype), bias.to(bn.weight.dtype)

    @torch.no_grad()
    def hard(self, bn: _BatchNorm) -> Tensor:
        factors = self.extra.value.expand(bn.num_features)
        return fit(factors > 0, factors, self.round_to, self.floor)

    def to(self, device: torch.device) -> None:
        super().to(device)
        self.extra.to(device)


class _InnerGate(FixedGate):
    """A BatchNorm inside a residual branch, which lives as long as the branch's factor is not zero."""

    def __init__(self, extra: Extra, width: int) -> None:
        super().__init__(torch.ones(width, dtype=torch.bool))
        self.extra = extra

    @torch.no_grad()
    def hard(self, bn: _BatchNorm) -> Tensor:
        return (self.extra.value > 0).expand(bn.num_features)


class SssPruner(AffinePruner):
    """Sparse Structure Selection (Huang and Wang, ECCV 2018) at work on a model.

    Every structure has a factor of at least zero that multiplies its output. Around each optimizer step the factors
    take an accelerated proximal step on ``strength * sum f``, with the optimizer's own learning rate and momentum,
    which makes some of them exactly zero. What has factor zero is dropped; there is no threshold.

    Blocks: one factor for each residual branch. It stands at the branch's last BatchNorm; where a convolution
    follows behind a ReLU (pre-activation), that is the same as behind the convolution. Channels: one factor for each
    channel of each BatchNorm that an activation follows.

    Args:
        model: A network with residual branches (blocks), or any with BatchNorms that an activation follows.
        example: What the model is called with: a tensor, a tuple of arguments, or (args, kwargs).
        strength: Weight of the factors' sum (the authors' gamma; 0.01 in their ImageNet configuration).
        structure: "block", "channel", or "auto": blocks where the network has residual branches, channels elsewhere.
        include: Only these BatchNorms, by name with wildcards; a block is named after its last one.
        exclude: Not these.
        round_to: Keep a multiple of this many channels at every site (channels only).
        min_channels: Keep at least this many at every site (channels only).
        seed: Not used; every method has one.
    """

    name = "sss"
    penalised = True

    def __init__(
        self,
        model: nn.Module,
        example: ExampleLike,
        *,
        strength: float = 0.01,
        structure: Structure = "auto",
        include: Globs = None,
        exclude: Globs = None,
        round_to: RoundTo = 1,
        min_channels: int = 0,
        seed: int = 0,
    ) -> None:
        if structure not in get_args(Structure):
            raise ConfigError(
                f"`structure` must be one of {', '.join(get_args(Structure))}. Got {structure!r}."
            )
        self.structure: Structure = structure
        self.extras: dict[str, Extra] = {}
        super().__init__(
            model,
            example,
            include=include,
            exclude=exclude,
            round_to=round_to,
            min_channels=min_channels,
            strength=strength,
            seed=seed,
        )

    def _read(self, model: nn.Module, example: ExampleLike, include: Globs, exclude: Globs) -> ChannelGraph:
        self.branches: dict[str, Branch] = {}
        if self.structure != "channel":
            graph = read_graph(model, example, include=include, exclude=exclude, every_norm=True)
            self.branches = residual_branches(graph)
            inside = {name for branch in self.branches.values() for name in branch.norms}
            blocks = graph.only(
                {site.name: "it is in no residual branch" for site in graph.sites if site.name not in inside}
            )
            if self.branches or self.structure == "block":
                self.structure = "block"
                return blocks
        self.structure = "channel"
        return super()._read(model, example, include, exclude)

    def _gate(self, number: int, site: Site) -> Gate:
        if self.structure == "channel":
            extra = self.extras.setdefault(site.name, Extra(torch.ones(site.width)))
            return _FactorGate(extra, site.width, self.round_to, self.floor(site))
        branch = next(branch for branch in self.branches.values() if site.name in branch.norms)
        extra = self.extras.setdefault(branch.last, Extra(torch.ones(1)))
        if site.name == branch.last:
            return _FactorGate(extra, site.width, 1, 0)
        return _InnerGate(extra, site.width)

    def factors(self) -> dict[str, Tensor]:
        """The factor of every structure: by the block's last BatchNorm, or per channel by site."""
        return {name: extra.value.detach().clone() for name, extra in self.extras.items()}

    def before_step(self) -> None:
        # The rate that the optimizer is about to use; a scheduler may change it behind the step.
        assert self._ride is not None
        gradients = take_gradients(self.extras.values())
        paces = paces_of(self._ride.optimizer, (self._masked[name].weight for name in self.extras))
        for extra, gradient, (rate, momentum) in zip(self.extras.values(), gradients, paces, strict=True):
            proximal_step_(extra.value, extra.velocity, gradient, rate, momentum, self.strength)

    def state_dict(self) -> dict[str, Any]:
        factors = {name: extra.state_dict() for name, extra in self.extras.items()}
        return {**super().state_dict(), "factors": factors}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        for name, extra in self.extras.items():
            extra.load_state_dict(state["factors"][name])
