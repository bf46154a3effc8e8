"""SFP and FPGM: filters are set to zero before training and after every epoch."""

from typing import Any, ClassVar, Literal, Unpack, get_args

import torch
from torch import Tensor, nn

from softprune.errors import CheckpointError, check_choice
from softprune.graph import ExampleLike
from softprune.graph.modules import by_filter
from softprune.masks import StoredMasks
from softprune.methods.options import Shares, TargetOptions
from softprune.methods.ranking import FilterPruner

Evaluation = Literal["strict", "authors"]
"""What evaluation computes where a filter is zero: "strict" zero, "authors" the constant that its BatchNorm emits."""


class SfpPruner(FilterPruner):
    """Soft Filter Pruning (He et al., IJCAI 2018) of a model.

    In every layer that feeds a BatchNorm, also the last of a residual branch, the int(ratio * width) filters with
    the smallest L2 norm are set to zero before training and after every epoch (call :meth:`end_epoch`). All of them
    are still trained. The cut removes the filters that are zero, also with ``evaluation="authors"``.

    Args:
        ratio: The share of filters that is zero in every layer (the authors' 1 - rate), or shares by glob on the
            BatchNorms' names; 0.4 by default.
        evaluation: "strict": a zeroed filter's channel is zero in evaluation. "authors": its BatchNorm's constant
            stays, as in the authors' code.
    """

    name = "sfp"
    description = "the filters of smallest norm set to zero after every epoch, free to grow back"
    settings: ClassVar[tuple[str, ...]] = ("ratios",)
    once = False
    default_ratio = 0.4
    masked_training = False
    """Whether the masks act in training, too: for filters that cannot grow back."""

    def __init__(
        self,
        model: nn.Module,
        example: ExampleLike,
        *,
        ratio: Shares | None = None,
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

    def end_epoch(self, epoch: int) -> None:
        self.zero_filters()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.attached and int(self.clock.step) == 0 and state.get("clock", {}).get("step"):
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

    In every layer that feeds a BatchNorm, the int(ratio_dist * width) filters with the smallest sum of distances to all
    others are set to zero before training and after every epoch (call :meth:`end_epoch`). As in the authors' ResNet
    code their gradients are masked in between; momentum and weight decay still act on them.

    Args:
        ratio_dist: The share of filters to remove (the authors' rate_dist), or shares by glob; 0.4 by default.
        evaluation: "strict": a zeroed filter's channel is zero, in training too. "authors": its BatchNorm's constant
            stays, as in the authors' code.
    """

    name = "fpgm"
    description = "the filters nearest to all others set to zero after every epoch, gradients masked"
    masked_training = True

    def __init__(
        self,
        model: nn.Module,
        example: ExampleLike,
        *,
        ratio_dist: Shares | None = None,
        evaluation: Evaluation = "strict",
        **options: Unpack[TargetOptions],
    ) -> None:
        super().__init__(model, example, ratio=ratio_dist, evaluation=evaluation, **options)

    def scores(self, network: nn.Module) -> dict[str, Tensor]:
        return {name: summed_distances(filters) for name, filters in self.filters(network).items()}

    @torch.no_grad()
    def before_step(self) -> None:
        masks = self.site_masks.by_site(self.site_masks.keep)
        for name, layer in self.layers(self.model).items():
            if layer.weight.grad is not None:
                rows = by_filter(layer, layer.weight.grad)
                rows.mul_(masks[name].view(*rows.shape[:2], *(1,) * (rows.dim() - 2)))
