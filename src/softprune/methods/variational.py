"""Variational Pruning, reconstructed: BatchNorm scales with a posterior; those that end at zero are removed.

No code of the authors exists. What the paper does not say was chosen here; docs/methods/variational.md lists it.
"""

import math
from typing import Unpack

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from softprune.graph import ExampleLike
from softprune.methods.learned import LearnedMasks, LearnedPruner
from softprune.methods.options import PrunerOptions, check_positive
from softprune.rng import Clock, uniform_noise


def normal_noise(clock: Clock, words: Tensor) -> Tensor:
    """Standard normal numbers, a pure function of the clock and the words."""
    return math.sqrt(2.0) * torch.erfinv(2.0 * uniform_noise(clock, words) - 1.0)


class PosteriorMasks(LearnedMasks):
    """y = scale * (x_hat + shift), with the scale drawn from N(mu, sigma^2) in training and mu in evaluation.

    mu is the BatchNorm's own weight, the shift its bias, and the learned vector log sigma.
    """

    def affine(self, bn: _BatchNorm, number: int, training: bool) -> tuple[Tensor, Tensor]:
        scale: Tensor = bn.weight
        if training:
            here, device = self.columns[number], bn.weight.device
            scale = scale + self.value[here].to(device).exp() * normal_noise(self.clock, self.words[here].to(device))
        return scale, scale * bn.bias


class VariationalPruner(LearnedPruner):
    """Variational Pruning (Zhao et al., CVPR 2019) of a model, a reconstruction.

    Each scale has the posterior N(mu, sigma^2) and is drawn once per channel and training forward; evaluation uses
    mu. The loss gains ``strength * sum mu^2 / (2 sigma^2)``, the divergence from a prior around zero whose variance
    is tied to the posterior's. After every epoch (call :meth:`end_epoch`), channels with |mu| and sigma below their
    thresholds are dropped permanently. The standard deviations are stepped beside the optimizer, at its learning rate
    and momentum.

    Args:
        strength: Weight of the divergence; 1 / (number of training images) would be the evidence lower bound.
        mu_below: A dropped channel's |mu| is below this.
        sigma_below: And its sigma below this.
        sigma: Standard deviation at the start. A scale that decays from 1 to 0 lets it grow by a factor of 1.4, so
            that it must start well below `sigma_below`.
    """

    name = "variational"
    description = "BatchNorm scales with a posterior; those that end at zero are removed (a reconstruction)"
    settings = ("mu_below", "sigma_below")
    site_masks: PosteriorMasks

    def __init__(
        self,
        model: nn.Module,
        example: ExampleLike,
        *,
        strength: float = 2e-6,
        mu_below: float = 0.02,
        sigma_below: float = 0.01,
        sigma: float = 0.005,
        **options: Unpack[PrunerOptions],
    ) -> None:
        self.mu_below = check_positive("mu_below", mu_below)
        self.sigma_below = check_positive("sigma_below", sigma_below)
        self._sigma = check_positive("sigma", sigma)
        super().__init__(model, example, strength=strength, **options)

    def _make_masks(self) -> PosteriorMasks:
        masks = PosteriorMasks(self.model, self.sites, self.clock, **self._rules())
        masks.learn(torch.full((masks.layout.channels,), math.log(self._sigma)))
        return masks

    def _extra_loss(self) -> Tensor:
        # A dropped channel plays no part any more; its divergence would only grow.
        masks = self.site_masks
        ratio = masks.row({name: bn.weight for name, bn in self.norms.items()}) / masks.value.exp()
        return self.strength * 0.5 * torch.where(masks.keep, ratio**2, 0.0).sum()

    def _step_vector(self, gradient: Tensor, rate: float | Tensor, momentum: float) -> None:
        masks = self.site_masks
        masks.velocity.mul_(momentum).add_(gradient)
        masks.value.sub_(rate * masks.velocity)

    @torch.no_grad()
    def end_epoch(self, epoch: int) -> None:
        masks = self.site_masks
        mu = masks.row({name: bn.weight.abs() for name, bn in self.norms.items()})
        keep = masks.keep & ~((mu < self.mu_below) & (masks.value.exp() < self.sigma_below))
        # What was dropped before does not come back to fill a floor.
        masks.keep.copy_(masks.filled(keep, torch.where(masks.keep, mu, -1.0)))
