"""Small networks whose cuts leave every kind of trace that an export must carry: indices and folded constants."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softprune import SoftPruner


class Residual(nn.Module):
    """A branch with BatchNorms inside, which may die as a whole; two named outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.branch = nn.Sequential(
            nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1, bias=False)
        )
        self.up = nn.ConvTranspose2d(8, 6, 2, stride=2, groups=2)
        self.norm = nn.BatchNorm2d(6)
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.stem(x)
        y = y + self.branch(y)
        z = F.relu(self.norm(self.up(y)))
        return {"map": z, "class": self.head(z.mean((2, 3)))}


class Dense(nn.Module):
    """Two readers of one stream, each with a BatchNorm of its own: the cut puts an index before one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn1, self.conv1 = nn.BatchNorm2d(8), nn.Conv2d(8, 6, 3, padding=1, bias=False)
        self.bn2, self.conv2 = nn.BatchNorm2d(14), nn.Conv2d(14, 6, 1, bias=False)
        self.fc = nn.Linear(6, 5)
        self.bn3 = nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = torch.cat([x, self.conv1(F.relu(self.bn1(x)))], 1)
        x = self.conv2(F.relu(self.bn2(x)))
        return F.hardswish(self.bn3(self.fc(x.mean((2, 3)))))


def randomise_(model: nn.Module, dead: float = 0.4, seed: int = 0) -> None:
    """BatchNorms as after a training with SCP: a share of the channels is dead."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            with torch.no_grad():
                module.weight.uniform_(0.5, 1.5, generator=generator)
                module.bias.normal_(0, 0.5, generator=generator)
                module.running_mean.normal_(0, 0.5, generator=generator)
                module.running_var.uniform_(0.5, 2, generator=generator)
                gone = torch.rand(module.num_features, generator=generator) < dead
                module.bias[gone] = -9.0
                module.weight[gone] = 0.1


def compacted(name: str) -> tuple[nn.Module, nn.Module, Tensor]:
    """(dense, compact, example) of "dense" or "residual", with some channels dead."""
    torch.manual_seed(0)
    model, example = Dense() if name == "dense" else Residual(), torch.randn(2, 3, 8, 8)
    randomise_(model)
    pruner = SoftPruner(model, example)
    compact = pruner.compact().eval()
    return pruner.detach(), compact, example
