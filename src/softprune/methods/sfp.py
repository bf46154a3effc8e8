"""Soft Filter Pruning: after every epoch the weakest filters are set to zero, and may grow back in the next."""

from collections.abc import Sequence
from typing import Any, Literal, Unpack, get_args

import torch
from torch import Tensor, nn

from softprune.errors import CheckpointError, check_choice
from softprune.graph import ExampleLike, Site
from softprune.graph.modules import by_filter
from softprune.masks import FixedGate, Gate
from softprune.methods.options import RankingOptions
from softprune.methods.ranking import FilterPruner, Ratio, ratio_or_target, ratio_per_site, within_site

Evaluation = Literal["strict", "authors"]
"""What evaluation computes where a filter is zero: "strict" zero, "authors" the constant that its BatchNorm emits."""


class _OpenGate(FixedGate):
    """Holds the decision without acting on it: the authors' evaluation, where a zeroed filter still has its shift."""

    def hard(self, bn: Any) -> Tensor:
        return torch.ones_like(self.mask, device=bn.weight.device)


class ZeroingPruner(FilterPruner):
    """What SFP and FPGM share: filters that are set to zero before training and after every epoch.

    The gate of each BatchNorm closes in evaluation where the filter is zero, so that the cut is exact; with
    ``evaluation="authors"`` it stays open, and evaluation shows the accuracy that the authors report. The cut is the
    strict one in either case.
    """

    masked_training = False
    """Whether these gates are closed in training, too: for filters that cannot grow back."""

    def __init__(
        self, model: nn.Module, example: ExampleLike, *, evaluation: Evaluation, **options: Unpack[RankingOptions]
    ) -> None:
        check_choice("`evaluation`", evaluation, get_args(Evaluation))
        self.evaluation: Evaluation = evaluation
        self._zeroed_here = False
        super().__init__(model, example, **options)

    def _gate(self, number: int, site: Site) -> Gate:
        everything = torch.ones(site.width, dtype=torch.bool)
        if self.evaluation == "authors":
            return _OpenGate(everything)
        return FixedGate(everything, masked_training=self.masked_training)

    def _select(self, site: Site, filters: Tensor) -> Tensor:
        """Booleans, False for the filters of a layer (one per row) that are to be zero."""
        raise NotImplementedError

    def _scores(self, filters: Tensor) -> Tensor:
        """Return the score of each filter of a layer: those with the smallest are zeroed to meet a target."""
        raise NotImplementedError

    @torch.no_grad()
    def zero_filters(self) -> None:
        """Select filters and set them to zero."""
        filters = self._filters(self.model)
        if self._limit is not None:
            scores = {name: within_site(self._scores(rows)) for name, rows in filters.items()}
            masks = self._meet_target(self.model, scores)
        else:
            masks = self._keep_coupled({site.name: self._select(site, filters[site.name]) for site in self.sites})
        self._store(masks)
        for name, layer in self._layers(self.model).items():
            rows = by_filter(layer, layer.weight)
            rows[~masks[name].view(rows.shape[:2])] = 0.0

    def _begin(self) -> None:
        self.zero_filters()
        self._zeroed_here = True

    def end_epoch(self, epoch: int) -> None:
        self._masked_model.check_in_place()
        self.zero_filters()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._zeroed_here and int(self.clock.step) == 0 and state.get("clock", {}).get("step"):
            raise CheckpointError(
                f"the state of {self.name} must be loaded before the optimizer is attached, since attaching begins "
                "training and sets filters to zero. Got a state after attach(); make the pruner, load, then attach."
            )
        super().load_state_dict(state)


class SfpPruner(ZeroingPruner):
    """Soft Filter Pruning (He et al., IJCAI 2018) of a model.

    In every layer that feeds a BatchNorm, also the last of a residual branch, the int(ratio * width) filters with
    the smallest L2 norm are set to zero before training and after every epoch (call :meth:`end_epoch`). All of them
    are still trained.

    Args:
        model: Any network in which convolutions feed BatchNorms; masked in place.
        example: What the model is called with: a tensor, a tuple of arguments, or (args, kwargs).
        ratio: The share of filters that is zero in every layer (the authors' 1 - rate), or shares by glob on the
            BatchNorms' names; 0.4 by default.
        evaluation: "strict": a zeroed filter's channel is zero in evaluation. "authors": its BatchNorm's constant
            stays, as in the authors' code.
        options: `target` and those of every method; see :class:`softprune.methods.options.RankingOptions`.
    """

    name = "sfp"
    description = "the filters of smallest norm set to zero after every epoch, free to grow back"
    settings = ("ratios",)

    def __init__(
        self,
        model: nn.Module,
        example: ExampleLike,
        *,
        ratio: Ratio | None = None,
        evaluation: Evaluation = "strict",
        **options: Unpack[RankingOptions],
    ) -> None:
        self._ratio = ratio_or_target("ratio", ratio, 0.4, options)
        super().__init__(model, example, evaluation=evaluation, **options)

    def _check_sites(self, names: Sequence[str]) -> None:
        self.ratios = ratio_per_site(self._ratio, names)

    def _scores(self, filters: Tensor) -> Tensor:
        return filters.norm(dim=1)

    def _select(self, site: Site, filters: Tensor) -> Tensor:
        return self._without_lowest(site, self._scores(filters), int(site.width * self.ratios[site.name]))
