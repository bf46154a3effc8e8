"""FPGM: the filters nearest to all others, which the others can stand in for, are set to zero after every epoch."""

from collections.abc import Sequence
from typing import Unpack

import torch
from torch import Tensor, nn

from softprune.errors import ConfigError, is_bool
from softprune.graph import ExampleLike, Site
from softprune.graph.modules import by_filter
from softprune.methods.options import RankingOptions
from softprune.methods.ranking import Ratio, drop_lowest, ratio_or_target, ratio_per_site
from softprune.methods.sfp import Evaluation, ZeroingPruner


def summed_distances(filters: Tensor) -> Tensor:
    """Each filter's sum of Euclidean distances to all of them: small near their geometric median."""
    # The matrix product is many times quicker than differences, but loses small distances in float32.
    precise = filters.double()
    distances = torch.cdist(precise, precise, compute_mode="use_mm_for_euclid_dist").fill_diagonal_(0)
    return distances.sum(1).to(filters.dtype)


class FpgmPruner(ZeroingPruner):
    """Filter Pruning via Geometric Median (He et al., CVPR 2019) of a model.

    In every layer that feeds a BatchNorm: first the int(ratio_norm * width) filters of smallest L2 norm, then, of
    those that are left, the int(ratio_dist * width) with the smallest sum of distances to all that are left, are set
    to zero before training and after every epoch (call :meth:`end_epoch`). As in the authors' code their gradients
    are masked in between; momentum and weight decay still act on them.

    Args:
        model: Any network in which convolutions feed BatchNorms; masked in place.
        example: What the model is called with: a tensor, a tuple of arguments, or (args, kwargs).
        ratio_dist: The share of filters to remove by distance (the authors' rate_dist), or shares by glob;
            0.4 by default.
        ratio_norm: The share to remove by norm before (the authors' 1 - rate_norm), or shares by glob; 0 by default.
        mask_gradients: Whether gradients of zeroed filters are masked. The authors' VGG script does not.
        evaluation: "strict": a zeroed filter's channel is zero in evaluation, and in training if its gradient is
            masked. "authors": its BatchNorm's constant stays, as in the authors' code.
        options: `target` and those of every method; see :class:`softprune.methods.options.RankingOptions`.
    """

    name = "fpgm"
    description = "the filters nearest to all others set to zero after every epoch, gradients masked"
    settings = ("norm_ratios", "distance_ratios", "mask_gradients")

    def __init__(
        self,
        model: nn.Module,
        example: ExampleLike,
        *,
        ratio_dist: Ratio | None = None,
        ratio_norm: Ratio | None = None,
        mask_gradients: bool = True,
        evaluation: Evaluation = "strict",
        **options: Unpack[RankingOptions],
    ) -> None:
        self._ratio_norm = ratio_or_target("ratio_norm", ratio_norm, 0.0, options)
        self._ratio_dist = ratio_or_target("ratio_dist", ratio_dist, 0.4, options)
        if not is_bool(mask_gradients):
            raise ConfigError(f"`mask_gradients` must be True or False. Got {mask_gradients!r}.")
        self.mask_gradients = self.masked_training = bool(mask_gradients)
        super().__init__(model, example, evaluation=evaluation, **options)

    def _check_sites(self, names: Sequence[str]) -> None:
        self.norm_ratios = ratio_per_site(self._ratio_norm, names, "ratio_norm")
        self.distance_ratios = ratio_per_site(self._ratio_dist, names, "ratio_dist")
        for name in names:
            if self.norm_ratios[name] + self.distance_ratios[name] >= 1:
                raise ConfigError(
                    f"`ratio_norm` and `ratio_dist` together must leave some filters of every layer. Got "
                    f"{self.norm_ratios[name]:g} and {self.distance_ratios[name]:g} for '{name}'; make one smaller."
                )

    def _scores(self, filters: Tensor) -> Tensor:
        return summed_distances(filters)

    def _select(self, site: Site, filters: Tensor) -> Tensor:
        keep = drop_lowest(filters.norm(dim=1), int(site.width * self.norm_ratios[site.name]))
        distances = torch.zeros_like(filters[:, 0])
        left = torch.nonzero(keep).squeeze(1)
        distances[left] = summed_distances(filters[left])
        near = drop_lowest(distances[left], int(site.width * self.distance_ratios[site.name]))
        keep[left] = near
        return self._filled(site, keep, distances)

    @torch.no_grad()
    def before_step(self) -> None:
        if not self.mask_gradients:
            return
        for name, layer in self._layers(self.model).items():
            if layer.weight.grad is not None:
                rows = by_filter(layer, layer.weight.grad)
                rows.mul_(self._stored(name).view(*rows.shape[:2], *(1,) * (rows.dim() - 2)))
