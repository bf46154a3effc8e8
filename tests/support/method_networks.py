"""Small networks, and a few steps of training on them."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softprune.methods import Pruner


class Chain(nn.Sequential):
    """Two convolutions with BatchNorm and ReLU, a linear layer."""

    def __init__(self, *widths: int, bias: bool = True) -> None:
        layers: list[nn.Module] = []
        inputs = 3
        for width in widths or (8, 12):
            layers += [nn.Conv2d(inputs, width, 3, padding=1, bias=bias), nn.BatchNorm2d(width), nn.ReLU()]
            inputs = width
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 5))


class _Block(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        branch = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(branch + self.shortcut(x))


class Residual(nn.Module):
    """Post-activation blocks: the last BatchNorm of each branch has no activation of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(8)
        self.blocks = nn.Sequential(_Block(8, 8), _Block(8, 12), _Block(12, 12))
        self.classifier = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.blocks(F.relu(self.bn(self.stem(x)))).mean((2, 3)))


class _PreActivation(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(width)
        self.conv1 = nn.Conv2d(width, 12, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(12)
        self.conv2 = nn.Conv2d(12, width, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(F.relu(self.bn2(self.conv1(F.relu(self.bn1(x))))))


class PreActivation(nn.Module):
    """Pre-activation blocks: branches end in a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.blocks = nn.Sequential(_PreActivation(8), _PreActivation(8))
        self.bn = nn.BatchNorm2d(8)
        self.classifier = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(F.relu(self.bn(self.blocks(self.stem(x)))).mean((2, 3)))


def batch(seed: int = 0, size: int = 6) -> tuple[Tensor, Tensor]:
    """Images of 8 x 8 and their classes."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(size, 3, 8, 8, generator=generator), torch.randint(5, (size,), generator=generator))


def sgd(pruner: Pruner, lr: float = 0.05) -> torch.optim.SGD:
    """The optimizer of these tests, attached."""
    optimizer = torch.optim.SGD(pruner.parameter_groups(weight_decay=1e-3), lr=lr, momentum=0.9, nesterov=True)
    pruner.attach(optimizer)
    return optimizer


def train(pruner: Pruner, optimizer: torch.optim.Optimizer, steps: int = 2, first: int = 0) -> list[float]:
    """Take steps, each on a batch of its own, and return the losses."""
    losses = []
    pruner.model.train()
    for step in range(first, first + steps):
        images, labels = batch(step)
        loss = pruner.loss(F.cross_entropy(pruner.model(images), labels))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
