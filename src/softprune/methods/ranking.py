"""Methods that rank channels by a score and remove the lowest: L1, Taylor, random, Slimming, and your own.

SFP and FPGM do so before training and after every epoch.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Unpack, get_args

import torch
from torch import Tensor, nn

from softprune.budget import FirstOrder, Limit, TableLike
from softprune.budget.limit import by_block
from softprune.cut.selection import Globs
from softprune.errors import CheckpointError, check_choice
from softprune.graph import ChannelGraph, ExampleLike
from softprune.graph.modules import by_filter
from softprune.masks import StoredMasks
from softprune.methods.options import (
    PrunerOptions,
    Shares,
    TargetOptions,
    check_positive,
    check_share,
    check_target,
    shares_by_site,
)
from softprune.methods.pruner import Pruner
from softprune.rng import channel_words
from softprune.target import TargetLike

Scope = Literal["global", "layer"]
Evaluation = Literal["strict", "authors"]
"""Output for a zero filter in evaluation: zero ("strict"), or the constant output of its BatchNorm ("authors")."""


class RankingPruner(Pruner):
    """Base class of methods that remove the channels with the lowest scores, by a ratio per site or to meet a target.

    The network trains without masks until :meth:`decide`. Before, `masks()`, `plan()`, `summary()` and `compact()` show
    the decision for the current weights; afterwards, the model trains and evaluates with the final masks. Subclasses
    define :meth:`scores`.

    Args:
        ratio: Share of channels to remove, or shares by glob pattern on the names of the BatchNorms.
        target: Target of the cut, instead of a ratio. See :class:`softprune.methods.options.TargetOptions`.
    """

    once: ClassVar[bool] = True
    """Whether channels are chosen once, in :meth:`decide`. Other methods update the masks during training."""
    scope: Scope = "layer"
    """How a target compares channels: by rank within their sites ("layer"), so that all sites lose the same share, or
    by score over all sites ("global")."""
    default_ratio: ClassVar[float] = 0.5
    first_strength: float = 0.0
    """Initial strength of the penalty, for methods with a penalty."""
    site_masks: StoredMasks
    _final = False

    def __init__(
        self,
        model: nn.Module,
        example: ExampleLike,
        *,
        ratio: Shares | None = None,
        target: TargetLike | None = None,
        latency_table: TableLike | None = None,
        **options: Unpack[PrunerOptions],
    ) -> None:
        check_target(target, "a ratio", ratio, latency_table=latency_table)
        self.has_target = target is not None
        super().__init__(model, example, strength=self.first_strength, **options)
        try:
            ratio = self.default_ratio if ratio is None else ratio
            self.ratios = shares_by_site("ratio", ratio, self.sites)
            """Share of channels to remove, by site."""
            if target is not None:
                self._limit = Limit(target, self._prunable(), latency_table)
        except BaseException:
            self.detach()
            raise

    def scores(self, network: nn.Module) -> dict[str, Tensor]:
        """Return the scores of the channels by site. With a ratio, only scores of the same site are compared."""
        raise NotImplementedError

    def comparable(self, scores: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return scores that are comparable across sites: unchanged ("global"), or relative ranks within the site."""
        if self.scope == "global":
            return dict(scores)
        assert self._limit is not None
        masks, blocks = self.site_masks, self._limit.prunable.coupled
        ranks = masks.layout.rank(masks.row(scores))
        if any(block > 1 for block in blocks.values()):  # rank the groups of a grouped convolution as a whole
            least = {name: -rank.double().cpu() for name, rank in masks.by_site(ranks).items()}
            for unit, block in blocks.items():
                if block > 1:
                    common = torch.stack([least[name] for name in unit]).amin(0)
                    least |= dict.fromkeys(unit, torch.from_numpy(by_block(common.numpy(), block)))
            ranks = masks.layout.rank(masks.row(least))
        return {name: 1 - rank.double() / len(rank) for name, rank in masks.by_site(ranks).items()}

    def drop_count(self, name: str, width: int) -> int:
        """Return the number of channels that a ratio removes from a site."""
        return int(width * self.ratios[name])

    def choose(self, row: Tensor) -> Tensor:
        """Return the masks for a ratio, before floors and multiples, from a row of scores."""
        layout = self.site_masks.layout
        kept = [site.width - self.drop_count(site.name, site.width) for site in layout.sites]
        return layout.rank(row) < torch.tensor(kept, device=row.device)[layout.site_of]

    @torch.no_grad()
    def decision(self, network: nn.Module) -> Tensor:
        """Return the masks of all sites by the weights of `network`, as a row."""
        masks, scores = self.site_masks, self.scores(network)
        if self._limit is not None:
            return masks.row(self._limit.masks(self._fold_gates(network), self.comparable(scores)))
        row = masks.row(scores)
        return masks.filled(self.choose(row), row)

    @property
    def decided(self) -> bool:
        return self._final or not self.once

    def decide(self) -> dict[str, Tensor]:
        if not self.decided:
            self.site_masks.keep.copy_(self.site_masks.row(self.masks()))
            self._final = True
        return self.masks()

    def masks(self, model: nn.Module | None = None) -> dict[str, Tensor]:
        if self.decided:
            return super().masks(model)
        self._check_in_place()
        return self.site_masks.by_site(self.decision(self._network_of(model)))

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "decided": self._final}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._final = bool(state["decided"])


class FilterPruner(RankingPruner):
    """Base class of methods that rank the filters of the layer before each site. All parameters have weight decay."""

    every_norm = True

    def _read(self, example: ExampleLike, **globs: Globs) -> ChannelGraph:
        graph = super()._read(example, **globs)
        feeders = {site.name: graph.feeder(site.name) for site in graph.sites}
        self.feeders = {name: feeder for name, feeder in feeders.items() if feeder is not None}
        """Name of the layer whose filters produce the channels of each site."""
        without = "its channels are not the filters of a single layer"
        return graph.only({name: without for name, feeder in feeders.items() if feeder is None})

    def layers(self, network: nn.Module) -> dict[str, Any]:
        """Return the layer before each site."""
        return {site.name: network.get_submodule(self.feeders[site.name]) for site in self.sites}

    def filters(self, network: nn.Module) -> dict[str, Tensor]:
        """Return the filters of each site as a matrix with one row per filter."""
        layers = self.layers(network).items()
        return {name: by_filter(layer, layer.weight.detach()).flatten(2).flatten(0, 1) for name, layer in layers}

    def parameter_groups(self, weight_decay: float = 0.0) -> list[dict[str, Any]]:
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        return [{"params": parameters, "weight_decay": weight_decay}]


class L1Pruner(FilterPruner):
    """L1-norm filter pruning (Li et al., ICLR 2017).

    The network is trained without masks, or is pretrained. :meth:`decide` then removes the filters with the smallest L1
    norm from each layer. Fine-tuning should follow.

    Args:
        ratio: Share of filters to remove from every layer, or shares by glob pattern on the names of the BatchNorms.
            Default: 0.5.
    """

    name = "l1"
    description = "one-shot: removes the filters with the smallest L1 norm; fine-tune afterwards"
    settings = ("ratios",)
    every_norm = False

    def scores(self, network: nn.Module) -> dict[str, Tensor]:
        return {name: filters.abs().sum(1) for name, filters in self.filters(network).items()}

    def drop_count(self, name: str, width: int) -> int:
        # The authors keep int(width (1 - ratio)).
        return width - int(width * (1 - self.ratios[name]))


class SfpPruner(FilterPruner):
    """Soft Filter Pruning (He et al., IJCAI 2018).

    In every layer followed by a BatchNorm, including the last one of a residual branch, the int(ratio * width) filters
    with the smallest L2 norm are set to zero before training and after every epoch (call :meth:`end_epoch`). They
    continue to be trained. The cut removes the filters that are zero, also with ``evaluation="authors"``.

    Args:
        ratio: Share of filters to set to zero in every layer (the authors' 1 - rate), or shares by glob pattern on the
            names of the BatchNorms. Default: 0.4.
        evaluation: "strict": the channels of zero filters are zero in evaluation. "authors": they are the constant
            output of the BatchNorm, as in the authors' code.
    """

    name = "sfp"
    description = "sets the filters with the smallest L2 norm to zero after every epoch; they can grow back"
    settings: ClassVar[tuple[str, ...]] = ("ratios",)
    once = False
    default_ratio = 0.4
    masked_training: ClassVar[bool] = False
    """Whether the channels of zero filters are masked in training too. Otherwise the filters can grow back."""

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
        super().__init__(model, example, ratio=ratio, **options)
        strict = evaluation == "strict"
        self.site_masks.masked_evaluation, self.site_masks.masked_training = strict, strict and self.masked_training

    def scores(self, network: nn.Module) -> dict[str, Tensor]:
        return {name: filters.norm(dim=1) for name, filters in self.filters(network).items()}

    @torch.no_grad()
    def zero_filters(self) -> None:
        """Choose filters by score and set them to zero."""
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
                f"the state of {self.name} must be loaded before the optimizer is attached, since attach() starts the "
                "training and sets filters to zero. Got a state after attach(); create the pruner, load, then attach."
            )
        super().load_state_dict(state)


def summed_distances(filters: Tensor) -> Tensor:
    """Return the sum of the Euclidean distances of each filter to all filters, small near their geometric median."""
    # Distances by matrix product are much faster than by differences, but too inaccurate in float32.
    precise = filters.double()
    distances = torch.cdist(precise, precise, compute_mode="use_mm_for_euclid_dist").fill_diagonal_(0)
    return distances.sum(1).to(filters.dtype)


class FpgmPruner(SfpPruner):
    """Filter Pruning via Geometric Median (He et al., CVPR 2019).

    In every layer followed by a BatchNorm, the int(ratio_dist * width) filters with the smallest sum of distances to
    all others are set to zero before training and after every epoch (call :meth:`end_epoch`). In between, their
    gradients are masked as in the authors' ResNet code; momentum and weight decay still apply to them.

    Args:
        ratio_dist: Share of filters to remove (the authors' rate_dist), or shares by glob pattern. Default: 0.4.
        evaluation: "strict": the channels of zero filters are zero, in training too. "authors": they are the constant
            output of the BatchNorm, as in the authors' code.
    """

    name = "fpgm"
    description = "sets the filters closest to all others to zero after every epoch and masks their gradients"
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


class TaylorPruner(RankingPruner):
    """First-order Taylor pruning (Molchanov et al., CVPR 2019).

    During training, for example one epoch at a small learning rate, the squared first-order change of the loss by
    removing each channel is accumulated. :meth:`decide` then removes the channels with the smallest sums. Fine-tuning
    should follow.

    Args:
        scope: With a `target`, "global" compares channels over the whole network, and "layer" removes the same share
            of every site.
        ratio: Share of channels to remove from every site, or shares by glob pattern on site names. Default: 0.5.
    """

    name = "taylor"
    description = "one-shot: removes the channels with the smallest first-order importance; fine-tune afterwards"
    settings = ("ratios", "scope")

    def __init__(
        self,
        model: nn.Module,
        example: ExampleLike,
        *,
        scope: Scope = "global",
        ratio: Shares | None = None,
        **options: Unpack[TargetOptions],
    ) -> None:
        check_choice("`scope`", scope, get_args(Scope))
        self.scope = scope
        super().__init__(model, example, ratio=ratio, **options)
        self.importance = FirstOrder(self.site_masks)

    def before_step(self) -> None:
        self.importance.add_()

    def scores(self, network: nn.Module) -> dict[str, Tensor]:
        return self.importance.scores()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "importance": self.importance.row.to("cpu", copy=True)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.importance.row.copy_(state["importance"])


class RandomPruner(RankingPruner):
    """Random pruning: the network trains without masks, then :meth:`decide` removes random channels of every site.

    This is the control for the criteria of other methods.

    Args:
        ratio: Share of channels to remove from every site, or shares by glob pattern on site names. Default: 0.5.
    """

    name = "random"
    description = "one-shot: removes random channels, the control for a method's criterion"
    settings = ("ratios",)

    def scores(self, network: nn.Module) -> dict[str, Tensor]:
        device, seed = self.clock.step.device, self.clock.seed
        return {site.name: channel_words(seed, i, site.width, device) for i, site in enumerate(self.sites)}


class SlimmingPruner(RankingPruner):
    """Network Slimming (Liu et al., ICCV 2017).

    Training adds ``strength * sum |gamma|`` to the loss, equivalent to the authors' ``strength * sign(gamma)`` in the
    gradient. :meth:`decide` then removes the share ``ratio`` of all channels, those with the smallest |gamma| in the
    network, and turns the penalty off. The shifts of removed channels are not compensated, so fine-tuning should
    follow. A layer may lose all channels and is then removed, unless it is on the only path to an output: then its best
    channel is kept.

    Args:
        strength: Factor of the penalty (1e-4 for VGG, 1e-5 for ResNet-164 and DenseNet-40).
        ratio: Share of channels to remove. Default: 0.7.
        initial_scale: Value to set the BatchNorm scales to when training starts (0.5 in the authors' networks). None
            keeps the scales, as appropriate for a pretrained network.
    """

    name = "slimming"
    description = "L1 penalty on BatchNorm scales, then one threshold for all channels; fine-tune afterwards"
    settings = ("ratio",)
    penalised = True
    scope = "global"
    default_ratio = 0.7

    def __init__(
        self,
        model: nn.Module,
        example: ExampleLike,
        *,
        strength: float = 1e-4,
        ratio: float | None = None,
        initial_scale: float | None = None,
        **options: Unpack[TargetOptions],
    ) -> None:
        self.first_strength, self.ratio = strength, check_share("ratio", 0.7 if ratio is None else ratio)
        self._initial_scale = None if initial_scale is None else check_positive("initial_scale", initial_scale)
        super().__init__(model, example, ratio=ratio, **options)

    @torch.no_grad()
    def _begin(self) -> None:
        if self._initial_scale is not None:
            for bn in self.norms.values():
                bn.weight.fill_(self._initial_scale)

    def _extra_loss(self) -> Tensor:
        # abs() has derivative 0 at 0, like the authors' sign(gamma).
        penalty = torch.cat([bn.weight for bn in self.norms.values()]).abs().sum()
        return self.strength * penalty

    def decide(self) -> dict[str, Tensor]:
        self.strength = 0.0
        return super().decide()

    def scores(self, network: nn.Module) -> dict[str, Tensor]:
        return {site.name: network.get_parameter(f"{site.name}.weight").detach().abs() for site in self.sites}

    def choose(self, row: Tensor) -> Tensor:
        # Keep int((1 - ratio) * total) channels, like the SCP authors' port, which gave the numbers in the paper.
        best = torch.argsort(row, descending=True, stable=True)[: int((1 - self.ratio) * len(row))]
        return torch.zeros_like(row, dtype=torch.bool).index_fill_(0, best, True)
