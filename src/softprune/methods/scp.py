"""Soft Channel Pruning (SCP): masks from each BatchNorm's own shift and scale, learned with the weights."""

from __future__ import annotations

from torch import Tensor, nn

from softprune.graph import ExampleLike, Site
from softprune.inspection import Globs
from softprune.masks import Gate, MaskConfig, SoftGate
from softprune.methods.base import Pruner


class SoftPruner(Pruner):
    """SCP at work on a model.

    Args:
        model: Any network with BatchNorms that an activation follows; masked in place.
        example: What the model is called with: a tensor, a tuple of arguments, or (args, kwargs).
        strength: The paper's lambda, the weight of the sparsity loss (1e-4 for VGG on CIFAR-10).
        masks: The constants of the masks; the defaults are the authors'.
        include: Only these BatchNorms, by name with wildcards.
        exclude: Not these.
        round_to: Keep a multiple of this many channels at every site.
        min_channels: Keep at least this many at every site. Where emptying a site would cut every path to an
            output, one channel stays in any case.
        seed: Of the masks' noise.
    """

    name = "scp"
    penalised = True
    shifts_decide = True

    def __init__(
        self,
        model: nn.Module,
        example: ExampleLike,
        *,
        strength: float = 1e-4,
        masks: MaskConfig | None = None,
        include: Globs = None,
        exclude: Globs = None,
        round_to: int = 1,
        min_channels: int = 0,
        seed: int = 0,
    ) -> None:
        self.mask_config = masks or MaskConfig()
        super().__init__(
            model,
            example,
            include=include,
            exclude=exclude,
            round_to=round_to,
            min_channels=min_channels,
            strength=strength,
            seed=seed,
        )

    def _gate(self, number: int, site: Site) -> Gate:
        return SoftGate(
            self.mask_config,
            self.clock,
            number,
            activation=site.activation,
            round_to=self.round_to,
            min_channels=self.floor(site),
        )

    def _extra_loss(self) -> Tensor:
        return self.strength * self._hooks.bank.loss()
