"""A plain LightningModule: only its optimizer knows of the pruner."""

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn


def _network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8),
        nn.ReLU(), nn.Flatten(), nn.Linear(128, 3),
    )  # fmt: skip


class Module(L.LightningModule):
    """One network and its classification loss."""

    def __init__(self, as_dict: bool = False) -> None:
        super().__init__()
        self.model = _network()
        self.as_dict = as_dict
        self.tasks: list[float] = []

    def training_step(self, batch: list[Tensor], index: int) -> Tensor | dict[str, Tensor]:
        loss = F.cross_entropy(self.model(batch[0]), batch[1])
        self.tasks.append(loss.item())
        return {"loss": loss} if self.as_dict else loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.pruner.parameter_groups(weight_decay=1e-4), lr=0.05)


class Manual(Module):
    """Two optimizers, stepped by hand; the BatchNorms are the second one's."""

    def __init__(self, attach: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.attach = attach

    def training_step(self, batch: list[Tensor], index: int) -> None:
        self.zero_grad()
        self.manual_backward(self.pruner.loss(F.cross_entropy(self.model(batch[0]), batch[1])))
        for optimizer in self.optimizers():
            optimizer.step()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        head = list(self.model[-1].parameters())
        body = [p for p in self.model.parameters() if all(p is not other for other in head)]
        optimizers = [torch.optim.SGD(head, lr=0.05), torch.optim.SGD(body, lr=0.05)]
        if self.attach:
            self.pruner.attach(optimizers[1])
        return optimizers
