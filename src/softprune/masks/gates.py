"""Gates: what decides about a BatchNorm's channels, in training and in evaluation."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from softprune.errors import ConfigError, ModelError, is_integer
from softprune.mask_config import GateStatistics, MaskConfig
from softprune.masks.activations import dead_edges
from softprune.masks.functional import alive_probability, dead_probability, hard_mask, relaxed_sample
from softprune.masks.sites import dead_at_every_point, site_affine, steepness
from softprune.rng import Clock, channel_words, logistic_noise


class Gate(Protocol):
    """Decides which channels of one site are on. Holds no reference to its BatchNorms.

    `bn` is the BatchNorm of the site, or any of those that share its mask; see :mod:`softprune.masks.sites`.
    """

    @property
    def gate_statistics(self) -> GateStatistics:
        """Which running statistics are not updated in channels whose sample is at most 1/2."""

    def sample(self, bn: _BatchNorm) -> Tensor | None:
        """Factor of each channel in this training forward; None trains a plain BatchNorm."""

    def hard(self, bn: _BatchNorm) -> Tensor:
        """Booleans, True where the channel is kept: what evaluation uses and what a cut would do."""

    def dead(self, bn: _BatchNorm) -> Tensor:
        """Booleans, True where the channel is dead; a multiple or a floor may keep it nevertheless."""

    def to(self, device: torch.device) -> None:
        """Follow the BatchNorm to another device."""


class SharedDecision:
    """What decides about channels. A deep copy of the model (an EMA, say) shares the tensors that hold the decision.

    They follow the model to another device, and stay there where a copy is moved: they are moved when they are read.
    """

    shared: ClassVar[tuple[str, ...]]
    """Their attributes. They change in place."""
    is_copy = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        made = copy.copy(self)
        memo[id(self)] = made
        for name, value in vars(self).items():
            if name not in self.shared:
                setattr(made, name, copy.deepcopy(value, memo))
        made.is_copy = True
        return made

    def to(self, device: torch.device) -> None:
        """Follow the BatchNorm to another device."""
        for name in () if self.is_copy else self.shared:
            value: Tensor | None = getattr(self, name)
            setattr(self, name, None if value is None else value.to(device))


class MaskDecision(SharedDecision):
    """Whether masks decided outside the gates are in force; one object for all gates of a model.

    The boolean is a 0-d tensor that changes in place, so that compiled steps and captured CUDA graphs see it.
    """

    shared = ("in_force",)

    def __init__(self, device: torch.device | str | None = None) -> None:
        self.in_force = torch.zeros((), dtype=torch.bool, device=device)

    def apply(self, value: Tensor, allowed: Tensor, otherwise: float = 0.0) -> Tensor:
        """Return `value`, while masks are in force with `otherwise` in channels that are not `allowed`."""
        off = (self.in_force & ~allowed).to(value.device)
        return torch.where(off, otherwise, value).to(value.dtype)


class SoftGate(SharedDecision):
    """SCP's gate: the BatchNorm's own shift and scale say how likely each channel is dead.

    The clock, which all gates of a model share, and the number of the site drive the noise.
    """

    shared = ("allowed", "weight")
    allowed: Tensor | None
    """Channels that a budget allows while its decision is in force; all others are off, in training too."""
    decision: MaskDecision | None
    """Says whether `allowed` is in force."""
    weight: Tensor | None
    """Factor of each channel's sparsity loss; None for 1. Changes in place."""

    def __init__(
        self,
        config: MaskConfig,
        clock: Clock,
        site: int,
        *,
        activation: str = "relu",
        round_to: int = 1,
        min_channels: int = 0,
    ) -> None:
        dead_edges(activation, config)  # refuses an unknown name now, and solves before anything is compiled
        self.config = config
        # Plain values, which torch.compile can compare and hash.
        self.constants = tuple(vars(config).values())
        self.clock = clock
        self.site = site
        self.activation = activation
        self.round_to = round_to
        self.min_channels = min_channels
        self.allowed = None
        self.decision = None
        self.weight = None

    @property
    def gate_statistics(self) -> GateStatistics:
        return self.config.gate_statistics

    def sample(self, bn: _BatchNorm) -> Tensor | None:
        dead = self.dead_probability(bn)
        words = channel_words(self.clock.seed, self.site, bn.num_features, dead.device)
        n = relaxed_sample(dead, logistic_noise(self.clock, words, dead.dtype), self.config)
        return self._among_allowed(n, 0.0)

    @torch.no_grad()
    def hard(self, bn: _BatchNorm, coupled: Sequence[tuple[SoftGate, _BatchNorm]] | None = None) -> Tensor:
        """Return the kept channels: those alive, filled up to the floor and to a multiple of `round_to`.

        While a budget's decision is in force, only channels that it allows are kept. Of `coupled` BatchNorms, by
        default those that `bn` knows, only channels that all keep are left; all have the same `min_channels`.
        """
        keep = self._among_allowed(~self.dead(bn), False)
        if self.round_to == 1 and self.min_channels == 0:
            return keep
        alive = self._chance(bn)
        if coupled is None:
            coupled = [(other.gate, other) for other in getattr(bn, "coupled", ())]
        if self.min_channels and coupled:
            keep = keep | keep_common([alive, *(gate._chance(other) for gate, other in coupled)], self.min_channels)
        return fill_to_multiple(keep, alive, self.round_to, self.min_channels)

    def _among_allowed(self, value: Tensor, otherwise: float) -> Tensor:
        """Return `value` with `otherwise` in channels that a decision in force does not allow."""
        if self.decision is None or self.allowed is None:
            return value
        return self.decision.apply(value, self.allowed, otherwise)

    def _chance(self, bn: _BatchNorm) -> Tensor:
        """Return how likely each channel is alive; -1 where it may not be kept."""
        return self._among_allowed(self.alive(bn), -1.0)

    def alive(self, bn: _BatchNorm) -> Tensor:
        """How likely each channel is alive: at the point of the site where it is likeliest."""
        alive = alive_probability(*site_affine(bn), self.config, self.activation, steepness(bn))
        return alive if alive.dim() == 1 else alive.amax(0)

    def dead_probability(self, bn: _BatchNorm) -> Tensor:
        """How likely each channel is dead."""
        dead = dead_probability(*site_affine(bn), self.config, self.activation, steepness(bn))
        return dead_at_every_point(dead)

    @torch.no_grad()
    def dead(self, bn: _BatchNorm) -> Tensor:
        return ~hard_mask(self.dead_probability(bn), self.config)

    def to(self, device: torch.device) -> None:
        super().to(device)
        self.clock.to(device)
        if self.decision is not None:
            self.decision.to(device)

    def __repr__(self) -> str:
        return f"SoftGate(site={self.site}, activation={self.activation!r})"


class FixedGate(SharedDecision):
    """A stored mask (True where a channel is kept), for methods that decide elsewhere, or have decided.

    Without `masked_training` the BatchNorm trains as a plain one.
    """

    gate_statistics: GateStatistics = "none"
    shared = ("mask",)

    def __init__(self, mask: Tensor, *, masked_training: bool = False) -> None:
        if mask.dtype != torch.bool or mask.dim() != 1:
            raise ModelError(
                "A fixed mask must be a one-dimensional tensor of booleans, True where the channel is kept. "
                f"Got {mask.dtype} of shape {tuple(mask.shape)}."
            )
        self.mask = mask
        self.masked_training = masked_training

    def sample(self, bn: _BatchNorm) -> Tensor | None:
        return self.mask.to(bn.weight) if self.masked_training else None

    def hard(self, bn: _BatchNorm) -> Tensor:
        return self.mask.to(bn.weight.device)

    def dead(self, bn: _BatchNorm) -> Tensor:
        return ~self.hard(bn)

    def __repr__(self) -> str:
        return f"FixedGate(width={self.mask.numel()}, masked_training={self.masked_training})"


class AffineGate(FixedGate):
    """A stored mask with a scale and a shift of the method's own in the place of the BatchNorm's.

    For methods that multiply a factor in, or draw the scale: what they compute stays an affine of the normalised
    input, so that no operation of the activation's size is added.
    """

    def __init__(self, mask: Tensor) -> None:
        super().__init__(mask, masked_training=True)

    def affine(self, bn: _BatchNorm) -> tuple[Tensor, Tensor]:
        """Scale and shift of each channel, as training draws them or, in eval mode, as they are expected to be."""
        raise NotImplementedError

    def masked_affine(self, bn: _BatchNorm) -> tuple[Tensor, Tensor]:
        """The same with zeros where the channel is off."""
        keep = self.hard(bn)
        weight, bias = (torch.where(keep, part, 0.0).to(bn.weight.dtype) for part in self.affine(bn))
        return weight, bias


def check_rounding(round_to: int, min_channels: int) -> None:
    """Raise unless both are numbers of channels."""
    if not is_integer(round_to) or round_to < 1:
        raise ConfigError(f"round_to must be an integer of at least 1. Got {round_to!r}.")
    if not is_integer(min_channels) or min_channels < 0:
        raise ConfigError(f"min_channels must be an integer of at least 0. Got {min_channels!r}.")


def keep_common(alive: Sequence[Tensor], count: int) -> Tensor:
    """Return `count` channels that all coupled BatchNorms keep; tensor operations only.

    These are the channels whose smallest probability of being alive is the largest.
    """
    least = torch.stack([*alive]).amin(0)
    order = torch.argsort(least, descending=True, stable=True)
    position = torch.arange(least.numel(), device=least.device)
    return position.scatter(0, order, position) < count


def fill_to_multiple(keep: Tensor, alive: Tensor, round_to: int = 1, min_channels: int = 0) -> Tensor:
    """Keep the channels most likely alive until the count fits; tensor operations only.

    The count becomes the next multiple of ``round_to`` that is at least ``min_channels``, or the whole width
    where there is none. A kept channel stays kept; ties go to the lower index. With ``min_channels`` 0 an empty
    mask stays empty.
    """
    width = keep.numel()
    count = keep.sum().clamp(min=min_channels)
    target = (count + (round_to - 1)) // round_to * round_to
    # Kept channels first (probabilities are at most 1), then by falling probability.
    order = torch.argsort(torch.where(keep, 2.0, alive), descending=True, stable=True)
    position = torch.arange(width, device=keep.device)
    rank = position.scatter(0, order, position)
    return rank < target
