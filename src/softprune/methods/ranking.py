"""Methods that rank the channels by a score and remove the lowest: L1, Taylor, random, Slimming, and one of your own.

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
"""What evaluation computes where a filter is zero: "strict" zero, "authors" the constant that its BatchNorm emits."""


class RankingPruner(Pruner):
    """A method that removes the channels of lowest score, a share `ratio` of every site or what a target asks for.

    The network trains whole. Until :meth:`decide`, `masks()`, `plan()`, `summary()` and `compact()` show what a
    decision now would be; from then on, the model trains and evaluates with the final masks. A subclass defines
    :meth:`scores`.

    Args:
        ratio: The share of channels to remove, or shares by glob on the BatchNorms' names.
        target: Instead of a ratio, a budget; :class:`softprune.methods.options.TargetOptions` has what goes with it.
    """

    once: ClassVar[bool] = True
    """Whether the decision is taken once, in :meth:`decide`. Other methods take it themselves, by :meth:`store`."""
    scope: Scope = "layer"
    """What a target compares: the ranks of channels within their sites, so that each site loses the same share, or
    with "global" the scores of all channels."""
    default_ratio: ClassVar[float] = 0.5
    first_strength: float = 0.0
    """The weight of what the method adds to the loss, where it adds something."""
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
            """The share of channels to remove at each site."""
            if target is not None:
                self._limit = Limit(target, self._prunable(), latency_table)
        except BaseException:
            self.detach()
            raise

    def scores(self, network: nn.Module) -> dict[str, Tensor]:
        """Return a score for every channel, by site. For a ratio they are compared within a site."""
        raise NotImplementedError

    def comparable(self, scores: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return scores that a target compares over all sites: as they are, or the rank within a site, from 1 down."""
        if self.scope == "global":
            return dict(scores)
        assert self._limit is not None
        masks, blocks = self.site_masks, self._limit.prunable.coupled
        ranks = masks.layout.rank(masks.row(scores))
        if any(block > 1 for block in blocks.values()):  # groups of a convolution are ranked as a whole
            least = {name: -rank.double().cpu() for name, rank in masks.by_site(ranks).items()}
            for unit, block in blocks.items():
                if block > 1:
                    common = torch.stack([least[name] for name in unit]).amin(0)
                    least |= dict.fromkeys(unit, torch.from_numpy(by_block(common.numpy(), block)))
            ranks = masks.layout.rank(masks.row(least))
        return {name: 1 - rank.double() / len(rank) for name, rank in masks.by_site(ranks).items()}

    def drop_count(self, name: str, width: int) -> int:
        """Return how many channels a ratio removes from a site."""
        return int(width * self.ratios[name])

    def choose(self, row: Tensor) -> Tensor:
        """Return a row of masks for a ratio from a row of scores; floors and multiples are added to it."""
        layout = self.site_masks.layout
        kept = [site.width - self.drop_count(site.name, site.width) for site in layout.sites]
        return layout.rank(row) < torch.tensor(kept, device=row.device)[layout.site_of]

    @torch.no_grad()
    def decision(self, network: nn.Module) -> Tensor:
        """Return the decision that the weights of `network` lead to, a row of all channels."""
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
    """A method that ranks the filters of the layer in front of each site. All parameters decay, as in its code."""

    every_norm = True

    def _read(self, example: ExampleLike, **globs: Globs) -> ChannelGraph:
        graph = super()._read(example, **globs)
        feeders = {site.name: graph.feeder(site.name) for site in graph.sites}
        self.feeders = {name: feeder for name, feeder in feeders.items() if feeder is not None}
        """The layer whose filters feed each site."""
        without = "it does not read the filters of one layer alone, channel by channel"
        return graph.only({name: without for name, feeder in feeders.items() if feeder is None})

    def layers(self, network: nn.Module) -> dict[str, Any]:
        """Return the layer that feeds each site."""
        return {site.name: network.get_submodule(self.feeders[site.name]) for site in self.sites}

    def filters(self, network: nn.Module) -> dict[str, Tensor]:
        """Return the filters of every site, one row each."""
        layers = self.layers(network).items()
        return {name: by_filter(layer, layer.weight.detach()).flatten(2).flatten(0, 1) for name, layer in layers}

    def parameter_groups(self, weight_decay: float = 0.0) -> list[dict[str, Any]]:
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        return [{"params": parameters, "weight_decay": weight_decay}]


class L1Pruner(FilterPruner):
    """L1-norm filter pruning (Li et al., ICLR 2017) of a model.

    The network trains as it is, or comes trained; :meth:`decide` then drops, layer by layer, the filters whose
    weights have the smallest L1 norm. Meant to be fine-tuned.

    Args:
        ratio: The share of filters to remove from every layer, or shares by glob on the BatchNorms' names;
            0.5 by default.
    """

    name = "l1"
    description = "removes the filters of smallest L1 norm from a trained network, once; to be fine-tuned"
    settings = ("ratios",)
    every_norm = False

    def scores(self, network: nn.Module) -> dict[str, Tensor]:
        return {name: filters.abs().sum(1) for name, filters in self.filters(network).items()}

    def drop_count(self, name: str, width: int) -> int:
        # The authors keep int(width (1 - ratio)).
        return width - int(width * (1 - self.ratios[name]))


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
    masked_training: ClassVar[bool] = False
    """Whether channels whose filters are zero are masked in training, too; filters grow back otherwise."""

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


class TaylorPruner(RankingPruner):
    """First-order Taylor pruning (Molchanov et al., CVPR 2019) of a model.

    While the network trains, or is only fine-tuned for an epoch at a small learning rate, the squared first-order
    change of the loss without each channel is summed up; :meth:`decide` then drops the channels with the smallest sums,
    once. Meant to be fine-tuned.

    Args:
        scope: With a `target`, "global" compares channels over the whole network, and "layer" removes the same share
            of every site.
        ratio: The share of channels to remove at every site, or shares by glob on their names; 0.5 by default.
    """

    name = "taylor"
    description = "removes the channels of smallest first-order importance, once; to be fine-tuned"
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
    """Random channels: the network trains as it is, then :meth:`decide` drops random channels of every site.

    The control: a method's criterion must do better.

    Args:
        ratio: The share of channels to remove at every site, or shares by glob on their names; 0.5 by default.
    """

    name = "random"
    description = "random channels: the control for a method's criterion"
    settings = ("ratios",)

    def scores(self, network: nn.Module) -> dict[str, Tensor]:
        device, seed = self.clock.step.device, self.clock.seed
        return {site.name: channel_words(seed, i, site.width, device) for i, site in enumerate(self.sites)}


class SlimmingPruner(RankingPruner):
    """Network Slimming (Liu et al., ICCV 2017) of a model.

    Training adds ``strength * sum |gamma|`` to the loss, which is the authors' ``strength * sign(gamma)`` on the
    gradient. :meth:`decide` then drops the share ``ratio`` of all channels, those with the smallest |gamma| over the
    whole network, and the penalty ends. The dropped channels' shifts go with them, uncompensated: expect to
    fine-tune. A layer that would lose everything is no error: where the network allows it, it goes, and where every
    path passes through it, its best channel stays.

    Args:
        strength: Weight of the penalty (1e-4 for VGG, 1e-5 for ResNet-164 and DenseNet-40).
        ratio: The share of channels to remove; 0.7 by default.
        initial_scale: Set the scales to this when training begins (the authors' networks start at 0.5). None leaves
            them, as is right for a network that is trained already.
    """

    name = "slimming"
    description = "L1 penalty on BatchNorm scales, then one threshold over all of them; to be fine-tuned"
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
        # abs() has the derivative 0 at 0, as the authors' sign(gamma) does.
        penalty = torch.cat([bn.weight for bn in self.norms.values()]).abs().sum()
        return self.strength * penalty

    def decide(self) -> dict[str, Tensor]:
        self.strength = 0.0
        return super().decide()

    def scores(self, network: nn.Module) -> dict[str, Tensor]:
        return {site.name: network.get_parameter(f"{site.name}.weight").detach().abs() for site in self.sites}

    def choose(self, row: Tensor) -> Tensor:
        # All but int((1 - ratio) total), as in the SCP authors' port, whose numbers are in the paper's tables.
        best = torch.argsort(row, descending=True, stable=True)[: int((1 - self.ratio) * len(row))]
        return torch.zeros_like(row, dtype=torch.bool).index_fill_(0, best, True)
