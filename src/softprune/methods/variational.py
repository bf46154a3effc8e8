"""Variational Pruning, reconstructed: BatchNorm scales with a posterior; those that end at zero are removed.

No code of the authors exists. What the paper does not say was chosen here; docs/methods/variational.md lists it.
"""

import math
from typing import Unpack

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from softprune.errors import ConfigError
from softprune.graph import ExampleLike, Site
from softprune.masks import AffineGate, Clock, Gate, channel_words, uniform_noise
from softprune.methods.affine import AffinePruner, LearnedVector
from softprune.methods.options import PrunerOptions, is_positive
from softprune.methods.ranking import StoredPruner


def normal_noise(clock: Clock, words: Tensor) -> Tensor:
    """Standard normal numbers, a pure function of the clock and the words."""
    return math.sqrt(2.0) * torch.erfinv(2.0 * uniform_noise(clock, words) - 1.0)


class _PosteriorGate(AffineGate):
    """y = scale * (x_hat + shift), with the scale drawn from N(mu, sigma^2) in training and mu in evaluation.

    mu is the BatchNorm's own weight, and the shift its bias.
    """

    def __init__(self, width: int, log_sigma: LearnedVector, clock: Clock, site: int) -> None:
        super().__init__(torch.ones(width, dtype=torch.bool))
        self.log_sigma, self.clock, self.site = log_sigma, clock, site

    def affine(self, bn: _BatchNorm) -> tuple[Tensor, Tensor]:
        scale: Tensor = bn.weight
        if bn.training:
            words = channel_words(self.clock.seed, self.site, bn.num_features, bn.weight.device)
            scale = scale + self.log_sigma.value.to(bn.weight.device).exp() * normal_noise(self.clock, words)
        return scale, scale * bn.bias

    def to(self, device: torch.device) -> None:
        super().to(device)
        self.clock.to(device)
        self.log_sigma.to(device)


class VariationalPruner(AffinePruner, StoredPruner):
    """Variational Pruning (Zhao et al., CVPR 2019) of a model, a reconstruction.

    Each scale has the posterior N(mu, sigma^2) and is drawn once per channel and training forward; evaluation uses
    mu. The loss gains ``strength * sum mu^2 / (2 sigma^2)``, the divergence from a prior around zero whose variance
    is tied to the posterior's. After every epoch (call :meth:`end_epoch`), channels with |mu| and sigma below their
    thresholds are dropped permanently. The standard deviations are stepped beside the optimizer, at its learning rate
    and momentum.

    Args:
        model: Any network with BatchNorms that an activation follows; masked in place.
        example: What the model is called with: a tensor, a tuple of arguments, or (args, kwargs).
        strength: Weight of the divergence; 1 / (number of training images) would be the evidence lower bound.
        mu_below: A dropped channel's |mu| is below this.
        sigma_below: And its sigma below this.
        sigma: Standard deviation at the start. A scale that decays from 1 to 0 lets it grow by a factor of 1.4, so
            that it must start well below `sigma_below`.
        options: Those of every method; see :class:`softprune.methods.options.PrunerOptions`.
    """

    name = "variational"
    description = "BatchNorm scales with a posterior; those that end at zero are removed (a reconstruction)"
    settings = ("mu_below", "sigma_below")
    penalised = True

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
        for key, value in (("mu_below", mu_below), ("sigma_below", sigma_below), ("sigma", sigma)):
            if not is_positive(value):
                raise ConfigError(f"`{key}` must be a number above 0. Got {value!r}.")
        self.mu_below, self.sigma_below, self._sigma = float(mu_below), float(sigma_below), float(sigma)
        self.extras: dict[str, LearnedVector] = {}
        super().__init__(model, example, strength=strength, **options)

    def _gate(self, number: int, site: Site) -> Gate:
        extra = self.extras[site.name] = LearnedVector(torch.full((site.width,), math.log(self._sigma)))
        return _PosteriorGate(site.width, extra, self.clock, number)

    def sigmas(self) -> dict[str, Tensor]:
        """The standard deviation of every channel's scale."""
        return {name: extra.value.detach().exp() for name, extra in self.extras.items()}

    def _extra_loss(self) -> Tensor:
        # A dropped channel plays no part any more; its divergence would only grow.
        terms = [
            torch.where(self._stored(name), (bn.weight / self.extras[name].value.exp()) ** 2, 0.0).sum()
            for name, bn in self.norms.items()
        ]
        return self.strength * 0.5 * torch.stack(terms).sum()

    def _step_vector(self, extra: LearnedVector, gradient: Tensor, rate: float | Tensor, momentum: float) -> None:
        extra.velocity.mul_(momentum).add_(gradient)
        extra.value.sub_(rate * extra.velocity)

    @torch.no_grad()
    def end_epoch(self, epoch: int) -> None:
        self._masked_model.check_in_place()
        sigmas, chosen = self.sigmas(), {}
        for site in self.sites:
            mu = self.norms[site.name].weight.abs()
            at_zero = (mu < self.mu_below) & (sigmas[site.name] < self.sigma_below)
            keep = self._stored(site.name) & ~at_zero
            # What was dropped before does not come back to fill a floor.
            chosen[site.name] = self._filled(site, keep, torch.where(self._stored(site.name), mu, -1.0))
        self._store(self._keep_coupled(chosen))
