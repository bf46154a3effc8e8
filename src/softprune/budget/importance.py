"""First-order importance: how much the loss would change if a channel were removed."""

import torch
from torch import Tensor

from softprune.masks import Masks


class FirstOrder:
    """Sums the squared first-order change of the loss for every channel over training steps.

    Removing a channel sets shift and scale of its BatchNorms to zero, which changes the loss by about
    ``beta * g_beta + gamma * g_gamma`` (Molchanov et al., CVPR 2019). Tensors change in place only, so that a captured
    step can add to them.
    """

    def __init__(self, masks: Masks) -> None:
        self.masks = masks
        self.row = torch.zeros(masks.layout.channels, device=masks.device)

    @torch.no_grad()
    def add_(self) -> None:
        """Add the gradients at hand."""
        if self.row.device != self.masks.device:
            self.row = self.row.to(self.masks.device)
        change = torch.cat([_change(bn) for bn in self.masks.modules[: len(self.masks.columns)]]).to(self.row.device)
        expand = self.masks.layout.expand
        if expand is not None:  # several BatchNorms of one site lose a channel together
            change = torch.zeros_like(self.row).index_add_(0, expand[0], change)
        # A step that a GradScaler skips has infinite gradients.
        self.row.add_(change.square().nan_to_num(0.0, posinf=0.0))

    def scores(self) -> dict[str, Tensor]:
        """Return the sums by site. Before the first step: the squared scales, so that there is an order."""
        row = self.row
        if not bool(row.any()):
            gamma = {name: bn.weight.detach().float().square() for name, bn in self.masks.members.items()}
            return {site.name: gamma[site.name] for site in self.masks.sites}
        return self.masks.by_site(row)


def _change(bn: torch.nn.Module) -> Tensor:
    total = torch.zeros_like(bn.weight, dtype=torch.float32)  # type: ignore[arg-type]
    for parameter in (bn.weight, bn.bias):
        if parameter.grad is not None:  # type: ignore[union-attr]
            total = total + parameter.float() * parameter.grad.float()  # type: ignore[operator, union-attr]
    return total
