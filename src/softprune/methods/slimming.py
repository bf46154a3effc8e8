"""Network Slimming: an L1 penalty on BatchNorm scales while training, then one threshold over all of them."""

from typing import Literal, Unpack, get_args

import torch
from torch import Tensor, nn

from softprune.errors import ConfigError, check_choice
from softprune.graph import ExampleLike
from softprune.methods.options import RankingOptions, is_positive
from softprune.methods.ranking import OneShotPruner, check_ratio, drop_lowest, ratio_or_target

CountRule = Literal["scp", "pytorch", "torch"]
"""How a ratio becomes a number of channels; see :func:`dropped_count`."""


def dropped_count(ratio: float, total: int, count: CountRule = "scp") -> int:
    """How many of `total` channels go.

    "scp": all but int((1 - ratio) total), as in the SCP authors' port, whose numbers are in the paper's tables.
    "pytorch": int(ratio total) + 1, as in the authors' PyTorch code, whose threshold is itself dropped.
    "torch": int(ratio total), as in their first release.
    """
    if count == "scp":
        return total - int((1 - ratio) * total)
    return int(ratio * total) + (count == "pytorch")


class SlimmingPruner(OneShotPruner):
    """Network Slimming (Liu et al., ICCV 2017) of a model.

    Training adds ``strength * sum |gamma|`` to the loss, which is the authors' ``strength * sign(gamma)`` on the
    gradient. :meth:`decide` then drops the share ``ratio`` of all channels, those with the smallest |gamma| over the
    whole network, and the penalty ends. The dropped channels' shifts go with them, uncompensated: expect to
    fine-tune. A layer that would lose everything is no error: where the network allows it, it goes, and where every
    path passes through it, its best channel stays.

    Args:
        model: Any network with BatchNorms that an activation follows; masked in place.
        example: What the model is called with: a tensor, a tuple of arguments, or (args, kwargs).
        strength: Weight of the penalty (1e-4 for VGG, 1e-5 for ResNet-164 and DenseNet-40).
        ratio: The share of channels to remove; 0.7 by default.
        count: How the ratio becomes a number: "scp", "pytorch" or "torch"; see :func:`dropped_count`.
        initial_scale: Set the scales to this when training begins (the authors' networks start at 0.5). None leaves
            them, as is right for a network that is trained already.
        options: `target` and those of every method; see :class:`softprune.methods.options.RankingOptions`.
    """

    name = "slimming"
    description = "L1 penalty on BatchNorm scales, then one threshold over all of them; to be fine-tuned"
    settings = ("ratio", "count")
    penalised = True

    def __init__(
        self,
        model: nn.Module,
        example: ExampleLike,
        *,
        strength: float = 1e-4,
        ratio: float | None = None,
        count: CountRule = "scp",
        initial_scale: float | None = None,
        **options: Unpack[RankingOptions],
    ) -> None:
        check_choice("`count`", count, get_args(CountRule))
        if initial_scale is not None and not is_positive(initial_scale):
            raise ConfigError(
                f"`initial_scale` must be a number above 0, or None. Got {initial_scale!r}; the authors' is 0.5."
            )
        self.ratio = check_ratio(ratio_or_target("ratio", ratio, 0.7, options))
        self.count, self._initial_scale = count, initial_scale
        super().__init__(model, example, strength=strength, **options)

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

    def _ranking(self, network: nn.Module) -> dict[str, Tensor]:
        weights = {site.name: network.get_submodule(site.name).weight for site in self.sites}
        return {name: weight.detach().abs() for name, weight in weights.items() if isinstance(weight, Tensor)}

    def _choose(self, network: nn.Module) -> dict[str, Tensor]:
        scales = list(self._ranking(network).values())
        widths = [site.width for site in self.sites]
        keep = drop_lowest(torch.cat(scales), dropped_count(self.ratio, sum(widths), self.count))
        return {
            site.name: self._filled(site, part, scale)
            for site, part, scale in zip(self.sites, keep.split(widths), scales, strict=True)
        }
