"""Soft Channel Pruning (SCP): masks from each BatchNorm's own shift and scale, learned with the weights."""

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from softprune.budget import Budget, TableLike
from softprune.errors import ConfigError
from softprune.graph import ExampleLike
from softprune.graph.channels import DEFAULT_KINDS, KINDS
from softprune.log import get_logger
from softprune.masks import MaskConfig, SoftMasks
from softprune.methods.options import PrunerOptions, check_share, check_target
from softprune.methods.pruner import Pruner
from softprune.target import TargetLike

logger = get_logger(__name__)


class SoftPruner(Pruner):
    """Soft Channel Pruning (Kang and Han, ICML 2020).

    Args:
        model: Any network with BatchNorms followed by activations, masked in place.
        example: An input of the model: a tensor, a tuple of arguments, or (args, kwargs).
        strength: Sparsity strength (the paper's lambda), the factor of the sparsity loss. Default: 1e-4, the value for
            VGG on CIFAR-10.
        target: Limit of the compact network, instead of a strength: ``{"macs": 0.5}`` keeps at most half of the MACs.
            The metric is macs, flops (two per MAC), params, activations, channels or latency; the amount is a share, a
            percentage ("50%") or an absolute value. Channels with the least effect on the outputs for their cost are
            chosen and faded out; :attr:`status` reports the progress.
        total_steps: Number of optimizer steps of the whole training. Required for a target.
        final_at: Share of the training after which the cut of a target is final. Default: 0.3 for a pretrained network,
            0.6 for an untrained one.
        latency_table: Result of :func:`softprune.budget.latency_table`, or its file, for a latency target in another
            runtime or on another machine. Default: measured here in eager PyTorch, at the example's batch size.
        masks: Constants of the masks. Default: those of the authors.
        site_kinds: Kinds of sites in addition to BatchNorms followed by an activation: "sum" (BatchNorms that are added
            before an activation share a mask), "linear" (BatchNorms without an activation), "stream" (all BatchNorms
            that write to a residual stream share a mask). Default: all three with a target, otherwise "sum".
        options: Options of all methods, :class:`softprune.methods.options.PrunerOptions`.
    """

    name = "scp"
    description = "soft channel pruning: masks from BatchNorm shift and scale, learned with the weights"
    continues = True
    penalised = True
    shifts_decide = True
    site_masks: SoftMasks

    def __init__(
        self,
        model: nn.Module,
        example: ExampleLike,
        *,
        strength: float | None = None,
        target: TargetLike | None = None,
        total_steps: int | None = None,
        final_at: float | None = None,
        latency_table: TableLike | None = None,
        masks: MaskConfig | None = None,
        site_kinds: Iterable[str] | None = None,
        **options: Unpack[PrunerOptions],
    ) -> None:
        needs = {"total_steps": total_steps, "final_at": final_at, "latency_table": latency_table}
        check_target(target, "`strength`", strength, **needs)
        self.mask_config = MaskConfig() if masks is None else masks
        default_kinds = DEFAULT_KINDS if target is None else KINDS
        self.site_kinds = default_kinds if site_kinds is None else site_kinds
        self.has_target = target is not None
        super().__init__(model, example, strength=1e-4 if strength is None else strength, **options)
        try:
            if target is not None:
                self._limit = self.budget = Budget(
                    target, total_steps, self._prunable(), self.site_masks, final_at=final_at, table=latency_table
                )
                self._set_strength(0.0)
        except BaseException:
            self.detach()
            raise

    def _make_masks(self) -> SoftMasks:
        return SoftMasks(self.model, self.sites, self.clock, self.mask_config, **self._rules())

    def _extra_loss(self) -> Tensor | None:
        """Return lambda L_sparse, equation 16 of the paper; see `masks.functional.sparsity_terms`."""
        if self.budget is not None:
            return None
        return self.strength * self.site_masks.loss()

    # --- a target ------------------------------------------------------------------------------------------------

    def decide(self) -> dict[str, Tensor]:
        self._check_in_place()
        if self.budget is not None:
            if not self.budget.is_final:
                logger.warning(
                    "softprune: the cut is made final at step %d of total_steps=%d, and the network has not trained "
                    "with it. Train to the end, or choose a checkpoint with pruner.status.margin >= 0",
                    int(self.clock.step),
                    self.budget.total_steps,
                )
            self.budget.finalise()
        return super().decide()

    def compact(
        self, model: nn.Module | None = None, *, round_to: int | None = None, gathers: bool = True
    ) -> nn.Module:
        self._check_in_place()
        if self.budget is None:
            return super().compact(model, round_to=round_to, gathers=gathers)
        if not gathers or round_to not in (None, self.round_to):
            raise ConfigError(
                "a target is only met by the cut that it was computed for: with gathers, in multiples of "
                f"{self.round_to}. Got gathers={gathers!r}, round_to={round_to!r}; train with that `round_to` "
                "(`method.round_to` in a recipe), and for a cut without gathers, with a strength instead of a target."
            )
        if not self.budget.is_final:
            logger.warning(
                "softprune: this cut is preliminary (step %d of total_steps=%d); the cut is final from step %d on. If "
                "training ends here, call pruner.decide() first: until then, evaluation does not use these masks",
                int(self.clock.step),
                self.budget.total_steps,
                self.budget.final_step,
            )
        network = self._network_of(model)
        with self.budget.tentative(of_a_copy=network is not self.model):
            self.budget.finalise(network)
            compact = super().compact(model, round_to=round_to, gathers=gathers)
            if self.budget.table is not None:
                self.budget.table.report(self.plan(model), compact, self.example)
        return compact

    def _made_with(self) -> dict[str, Any]:
        steps = {} if self.budget is None else {"total_steps": self.budget.total_steps}
        return {**super()._made_with(), "masks": asdict(self.mask_config), **steps}

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        return state if self.budget is None else {**state, "budget": self.budget.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if self.budget is not None:
            self.budget.load_state_dict(state["budget"])


class TargetSoftPruner(SoftPruner):
    """SCP's target-ratio training (section "Target channel pruning ratio" of the paper).

    In each step, the sparsity loss applies only to the share ``ratio`` of all channels with the highest dead
    probability. If the loss of those that are still alive has risen since the previous step, the step minimises the
    sparsity loss alone; otherwise it minimises the joint loss. The task loss is multiplied by 0 or 1 on the device, so
    that every parameter has a gradient in every step.

    Args:
        ratio: Share of channels to drop, over all sites.
        strength: Factor of the sparsity loss. It does not determine how many channels are removed, but if it is too
            small, the chosen channels do not die within the training.
        masks: Constants of the masks. Default: those of the authors.
        site_kinds: Further kinds of sites, as in :class:`SoftPruner`.
    """

    name = "scp-target"
    description = "SCP that removes a given share of the channels, without a search for the strength"
    continues = False
    settings = ("ratio",)

    def __init__(
        self,
        model: nn.Module,
        example: ExampleLike,
        *,
        ratio: float = 0.4,
        strength: float = 1e-3,
        masks: MaskConfig | None = None,
        site_kinds: Iterable[str] = DEFAULT_KINDS,
        **options: Unpack[PrunerOptions],
    ) -> None:
        self.ratio = check_share("ratio", ratio)
        super().__init__(model, example, strength=strength, masks=masks, site_kinds=site_kinds, **options)
        self._shuffle = torch.argsort(self.site_masks.words, stable=True)
        self.count = round(self.ratio * len(self._shuffle))
        # Terms of the previous and of the current step. Infinity, so that nothing rises in the first step.
        self._before = torch.full((len(self._shuffle),), torch.inf, device=self._shuffle.device)
        self._now = self._before.clone()

    def _terms(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return sparsity losses, a mask of the chosen channels, and a mask of those that are still alive."""
        masks = self.site_masks
        if self._before.device != masks.device:
            self._before, self._now = self._before.to(masks.device), self._now.to(masks.device)
            self._shuffle = self._shuffle.to(masks.device)
        # Untrained channels all have the same probability. Shuffle, or entire first layers would be chosen.
        order = self._shuffle[torch.argsort(masks.alive().detach()[self._shuffle], stable=True)]
        chosen = torch.zeros_like(order, dtype=torch.bool)
        chosen.index_fill_(0, order[: self.count], True)  # indexed assignment would copy a scalar from the host
        return masks.channel_terms(), chosen, chosen & ~masks.dead()

    def _extra_loss(self) -> Tensor:
        terms, chosen, _ = self._terms()
        return self.strength * torch.where(chosen, terms, 0.0).sum()

    def _total_loss(self, task: Tensor) -> Tensor:
        terms, chosen, pending = self._terms()
        self._now.copy_(terms.detach())
        # Without `pending`, the terms of dead channels, which fall in every step, would hide the rise of the others.
        rise = torch.where(pending, terms.detach() - self._before, 0.0).sum()
        joint = (rise <= 0).to(task.dtype)
        sparse = self.strength * torch.where(chosen, terms, 0.0).sum()
        return task * joint.to(task.device) + sparse.to(task.device)

    def after_step(self) -> None:
        self._before.copy_(self._now)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "sparsity": self._before.to("cpu", copy=True)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._before.copy_(state["sparsity"])
