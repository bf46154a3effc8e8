"""SFP and FPGM: filters are set to zero before training and after every epoch."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, Unpack, get_args

import torch
from torch import Tensor, nn

from softprune.errors import CheckpointError, ConfigError, check_choice, is_bool
from softprune.graph import ExampleLike
from softprune.graph.modules import by_filter
from softprune.masks import StoredMasks
from softprune.methods.options import TargetOptions
from softprune.methods.ranking import FilterPruner, Ratio, lowest, ratio_per_site

Evaluation = Literal["strict", "authors"]
"""What evaluation computes where a filter is zero: "strict" zero, "authors" the constant that its BatchNorm emits."""


class SfpPruner(FilterPruner):
    """Soft Filter Pruning (He et al., IJCAI 2018) of a model.

    In every layer that feeds a BatchNorm, also the last of a residual branch, the int(ratio * width) filters with
    the smallest L2 norm are set to zero before training and after every epoch (call :meth:`end_epoch`). All of them
    are still trained. The cut removes the filters that are zero, also with ``evaluation="authors"``.

    Args:
        model: Any network in which convolutions feed BatchNorms; masked in place.
        example: What the model is called with: a tensor, a tuple of arguments, or (args, kwargs).
        ratio: The share of filters that is zero in every layer (the authors' 1 - rate), or shares by glob on the
            BatchNorms' names; 0.4 by default.
        evaluation: "strict": a zeroed filter's channel is zero in evaluation. "authors": its BatchNorm's constant
            stays, as in the authors' code.
        options: `target` and those of every method; see :class:`RankingPruner`.
    """

    name = "sfp"
    description = "the filters of smallest norm set to zero after every epoch, free to grow back"
    settings: ClassVar[tuple[str, ...]] = ("ratios",)
    once = False
    default_ratio = 0.4
    masked_training = False
    """Whether the masks act in training, too: for filters that cannot grow back."""
    _zeroed_here = False

    def __init__(
        self,
        model: nn.Module,
        example: ExampleLike,
        *,
        ratio: Ratio | None = None,
        evaluation: Evaluation = "strict",
        **options: Unpack[TargetOptions],
    ) -> None:
        check_choice("`evaluation`", evaluation, get_args(Evaluation))
        self.evaluation: Evaluation = evaluation
        super().__init__(model, example, ratio=ratio, **options)

    def _make_masks(self) -> StoredMasks:
        return StoredMasks(
            self.model,
            self.sites,
            self.clock,
            masked_training=self.masked_training and self.evaluation == "strict",
            masked_evaluation=self.evaluation == "strict",
        )

    def scores(self, network: nn.Module) -> dict[str, Tensor]:
        return {name: filters.norm(dim=1) for name, filters in self.filters(network).items()}

    @torch.no_grad()
    def zero_filters(self) -> None:
        """Select filters and set them to zero."""
        self.site_masks.keep.copy_(self.decision(self.model))
        masks = super().masks()
        for name, layer in self.layers(self.model).items():
            rows = by_filter(layer, layer.weight)
            rows[~masks[name].view(rows.shape[:2])] = 0.0

    def _begin(self) -> None:
        self.zero_filters()
        self._zeroed_here = True

    def end_epoch(self, epoch: int) -> None:
        self.zero_filters()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._zeroed_here and int(self.clock.step) == 0 and state.get("clock", {}).get("step"):
            raise CheckpointError(
                f"the state of {self.name} must be loaded before the optimizer is attached, since attaching begins "
                "training and sets filters to zero. Got a state after attach(); make the pruner, load, then attach."
            )
        super().load_state_dict(state)


def summed_distances(filters: Tensor) -> Tensor:
    """Return each filter's sum of Euclidean distances to all of them: small near their geometric median."""
    # The matrix product is many times quicker than differences, but loses small distances in float32.
    precise = filters.double()
    distances = torch.cdist(precise, precise, compute_mode="use_mm_for_euclid_dist").fill_diagonal_(0)
    return distances.sum(1).to(filters.dtype)


class FpgmPruner(SfpPruner):
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
        options: `target` and those of every method; see :class:`RankingPruner`.
    """

    name = "fpgm"
    description = "the filters nearest to all others set to zero after every epoch, gradients masked"
    settings: ClassVar[tuple[str, ...]] = ("norm_ratios", "ratios", "mask_gradients")

    def __init__(
        self,
        model: nn.Module,
        example: ExampleLike,
        *,
        ratio_dist: Ratio | None = None,
        ratio_norm: Ratio | None = None,
        mask_gradients: bool = True,
        evaluation: Evaluation = "strict",
        **options: Unpack[TargetOptions],
    ) -> None:
        if options.get("target") is not None and ratio_norm is not None:
            raise ConfigError(f"`ratio_norm` and `target` exclude each other. Got ratio_norm = {ratio_norm!r}.")
        if not is_bool(mask_gradients):
            raise ConfigError(f"`mask_gradients` must be True or False. Got {mask_gradients!r}.")
        self._ratio_norm = 0.0 if ratio_norm is None else ratio_norm
        self.mask_gradients = self.masked_training = bool(mask_gradients)
        super().__init__(model, example, ratio=ratio_dist, evaluation=evaluation, **options)

    def _check_sites(self, names: Sequence[str]) -> None:
        self.norm_ratios = ratio_per_site(self._ratio_norm, names, "ratio_norm")
        self.ratios = ratio_per_site(self._ratio, names, "ratio_dist")
        for name in names:
            if self.norm_ratios[name] + self.ratios[name] >= 1:
                raise ConfigError(
                    "`ratio_norm` and `ratio_dist` together must leave some filters of every layer. Got "
                    f"{self.norm_ratios[name]:g} and {self.ratios[name]:g} for '{name}'; make one smaller."
                )

    def scores(self, network: nn.Module) -> dict[str, Tensor]:
        if self._limit is not None:
            return {name: summed_distances(filters) for name, filters in self.filters(network).items()}
        found = {}
        for name, filters in self.filters(network).items():
            first = lowest(filters.norm(dim=1), int(len(filters) * self.norm_ratios[name]))
            left = torch.ones(len(filters), dtype=torch.bool, device=filters.device).index_fill(0, first, False)
            found[name] = torch.zeros_like(filters[:, 0])
            found[name][left] = summed_distances(filters[left])
        return found

    def choose(self, scores: Mapping[str, Tensor]) -> dict[str, Tensor]:
        keep = {}
        for name, filters in self.filters(self.model).items():
            width = len(filters)
            here = torch.ones(width, dtype=torch.bool, device=filters.device)
            here[lowest(filters.norm(dim=1), int(width * self.norm_ratios[name]))] = False
            left = torch.nonzero(here).squeeze(1)
            here[left[lowest(scores[name][left], int(width * self.ratios[name]))]] = False
            keep[name] = here
        return keep

    @torch.no_grad()
    def before_step(self) -> None:
        if not self.mask_gradients:
            return
        masks = self.site_masks.by_site(self.site_masks.keep)
        for name, layer in self.layers(self.model).items():
            if layer.weight.grad is not None:
                rows = by_filter(layer, layer.weight.grad)
                rows.mul_(masks[name].view(*rows.shape[:2], *(1,) * (rows.dim() - 2)))
