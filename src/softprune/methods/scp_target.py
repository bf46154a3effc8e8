"""SCP at a target ratio: train until a given share of the channels is dead, without a search for the strength."""

from collections.abc import Iterable
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from softprune.graph import ExampleLike
from softprune.graph.sites import DEFAULT_KINDS
from softprune.masks import MaskConfig, channel_words, site_affine, sparsity_terms
from softprune.methods.options import PrunerOptions
from softprune.methods.ranking import check_ratio
from softprune.methods.scp import SoftPruner


class TargetSoftPruner(SoftPruner):
    """SCP's target-ratio training (section "Target channel pruning ratio" of the paper).

    The sparsity loss acts on the share ``ratio`` of all channels alone, those most likely dead at the moment. When
    it has risen since the step before, over the chosen channels that are still alive, a step descends on it alone;
    otherwise on the joint loss. The task's loss is multiplied by 0 or 1 on the device, so that every parameter has a
    gradient in every step.

    Args:
        model: Any network with BatchNorms that an activation follows; masked in place.
        example: What the model is called with: a tensor, a tuple of arguments, or (args, kwargs).
        ratio: The share of channels, over all sites, that is to be dropped.
        strength: Weight of the sparsity loss: how hard the chosen channels are pushed, no longer how many go. Too
            small, and they do not die within the training.
        masks: The constants of the masks; the defaults are the authors'.
        site_kinds: Kinds of sites beside BatchNorms that an activation reads, as :class:`SoftPruner` takes them.
        options: Those of every method; see :class:`softprune.methods.options.PrunerOptions`.
    """

    name = "scp-target"
    description = "SCP that ends at a given share of channels, without a search for the strength"
    continues = False
    settings = (*SoftPruner.settings, "ratio")

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
        self.ratio = check_ratio(ratio)
        super().__init__(model, example, strength=strength, masks=masks, site_kinds=site_kinds, **options)
        device = self.clock.step.device
        words = [channel_words(self.clock.seed, number, site.width) for number, site in enumerate(self.sites)]
        self._shuffle = torch.argsort(torch.cat(words), stable=True).to(device)
        self.count = round(self.ratio * len(self._shuffle))
        # The terms of the step before and of this one; nothing rises above infinity.
        self._before = torch.full((len(self._shuffle),), torch.inf, device=device)
        self._now = self._before.clone()

    def _terms(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the sparsity loss of every channel, which channels are chosen, and which of those are still alive."""
        device = self.clock.step.device
        if self._before.device != device:
            self._before, self._now = self._before.to(device), self._now.to(device)
            self._shuffle = self._shuffle.to(device)
        terms, alive, dead = [], [], []
        for name, bn in self.norms.items():
            gate = self._soft_gate(name)
            at_points = sparsity_terms(*site_affine(bn), gate.config, gate.activation)
            terms.append(torch.atleast_2d(at_points).sum(0))
            alive.append(gate.alive(bn).detach())
            dead.append(gate.dead(bn))
        # Untrained channels are all alike. In the order of the layers the first layers would be chosen whole.
        order = self._shuffle[torch.argsort(torch.cat(alive)[self._shuffle], stable=True)]
        chosen = torch.zeros_like(order, dtype=torch.bool)
        chosen.index_fill_(0, order[: self.count], True)  # an assignment would copy a scalar from the host
        return torch.cat(terms), chosen, chosen & ~torch.cat(dead)

    def _extra_loss(self) -> Tensor:
        terms, chosen, _ = self._terms()
        return self.strength * torch.where(chosen, terms, 0.0).sum()

    def _total_loss(self, task: Tensor) -> Tensor:
        terms, chosen, pending = self._terms()
        self._now.copy_(terms.detach())
        # The shift of a dead channel falls in every step: counted too, it would hide that the others rise.
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
