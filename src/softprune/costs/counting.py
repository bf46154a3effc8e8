"""`cost`: parameters and MACs of a model, exactly or by the rules of the SCP authors."""

from collections.abc import Mapping
from typing import Literal

from torch import Tensor, nn

from softprune.costs.exact import count_exact
from softprune.costs.paper import count_paper
from softprune.costs.record import Cost
from softprune.errors import ConfigError
from softprune.graph.example import ExampleLike


def cost(
    model: nn.Module,
    example: ExampleLike,
    *,
    counting: Literal["exact", "paper"] = "exact",
    masks: Mapping[str, Tensor] | None = None,
) -> Cost:
    """Count what `model` costs. Nothing is computed and the model is not changed.

    Args:
        model: Any model; for ``counting="paper"``, one of the SCP paper's networks from `softprune.models`.
        example: What the model is called with: a tensor, a tuple of arguments, or ``(args, kwargs)``.
        counting: ``"exact"`` counts multiply-accumulates of convolutions and linear layers on the operators
            that the forward runs in eval mode, per sample of the example (for the whole call where its tensors
            do not share their first dimension), and every parameter once. ``"paper"`` counts as the SCP authors.
        masks: For ``"paper"``, names of BatchNorms with boolean masks, True for a kept channel.

    Raises:
        ConfigError: if there is no rule for the model, or masks do not fit.
        ModelError: if the model does not run on the example.
    """
    if counting == "paper":
        return count_paper(model, example, masks)
    if counting != "exact":
        raise ConfigError(f'counting must be "exact" or "paper". Got {counting!r}.')
    if masks is not None:
        raise ConfigError(
            '`masks` needs counting="paper"; the exact cost is that of the model without masks. '
            'Got masks and counting="exact"; count the compact model instead.'
        )
    return count_exact(model, example)
