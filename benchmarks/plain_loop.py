"""The loop that softprune's is measured against: a DataLoader, eager PyTorch, the paper's formulas as they stand."""

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from softprune.methods.optimizer_hooks import undecayed_biases

STRENGTH = 1e-4
MEAN, STD = (125.3, 123.0, 113.9), (63.0, 62.1, 66.7)


def pixels(options: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """Images of CIFAR's shape, and labels, by chance."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (options.images, 3, 32, 32), dtype=torch.uint8, generator=generator)
    return images, torch.randint(0, 10, (options.images,), generator=generator)


class _Images(Dataset[tuple[Tensor, Tensor]]):
    """Images with the usual transforms, one at a time, as a DataLoader's workers make them."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels
        self.mean, self.std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = F.pad((self.images[index].float() - self.mean) / self.std, (4, 4, 4, 4))
        top, left, mirrored = torch.randint(0, 9, (3,)).tolist()
        image = image[:, top : top + 32, left : left + 32]
        return (image.flip(-1) if mirrored < 5 else image), self.labels[index]


class _NaiveMask(nn.Module):
    """The paper's formulas written out after a BatchNorm."""

    def __init__(self, bn: nn.BatchNorm2d) -> None:
        super().__init__()
        self.bn = bn

    def forward(self, x: Tensor) -> Tensor:
        beta, gamma = self.bn.bias, self.bn.weight
        dead = 0.5 * (1 + torch.erf((0.05 - beta) / ((gamma.abs() + 1e-8) * 2**0.5)))
        u = torch.rand_like(dead).clamp(1e-6, 1 - 1e-6)
        n = torch.sigmoid((torch.log(u) - torch.log1p(-u) - 20 * (dead - 0.95)) / 0.5)
        return self.bn(x) * n.view(1, -1, 1, 1)

    def loss(self) -> Tensor:
        return (self.bn.bias + 2 * self.bn.weight.abs()).sum()


def _mask_naively(module: nn.Module) -> list[_NaiveMask]:
    masks = []
    for name, child in module.named_children():
        if isinstance(child, nn.BatchNorm2d):
            masks.append(_NaiveMask(child))
            setattr(module, name, masks[-1])
        else:
            masks += _mask_naively(child)
    return masks


def plain_steps(
    network: nn.Module, key: dict[str, Any], options: argparse.Namespace
) -> tuple[Iterator[Any], Callable[[], dict[str, Any]]]:
    """The loop that most scripts have: a DataLoader, eager PyTorch with its defaults, SGD."""
    masks = _mask_naively(network) if key["masks"] else []
    groups = undecayed_biases(network, 2e-4)
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True)
    loader = DataLoader(
        _Images(*pixels(options)),
        batch_size=options.batch,
        shuffle=True,
        drop_last=True,
        num_workers=options.workers,
        pin_memory=options.device.startswith("cuda"),
        persistent_workers=options.workers > 0,
    )
    kind = torch.device(options.device).type

    def steps() -> Iterator[None]:
        while True:
            for images, labels in loader:
                images = images.to(options.device, non_blocking=True)
                labels = labels.to(options.device, non_blocking=True)
                with torch.autocast(kind, dtype=torch.bfloat16, enabled=key["precision"] == "bf16"):
                    loss = F.cross_entropy(network(images), labels)
                for mask in masks:
                    loss = loss + STRENGTH * mask.loss()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                yield

    return steps(), lambda: {"mode": "plain"}
