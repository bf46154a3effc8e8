"""SCP's target ratio: which channels are pushed, when a step is on the sparsity alone, and where a run ends."""

import pytest
import torch
import torch.nn.functional as F
from method_networks import Chain, batch, sgd
from torch import Tensor, nn

from softprune import MaskConfig, models
from softprune.lab.data import load_data
from softprune.masks.functional import dead_probability, sparsity_terms
from softprune.methods import TargetSoftPruner


def spread_scales(model: nn.Module) -> None:
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.weight.copy_(torch.rand(module.num_features) + 0.1)
                module.bias.copy_(torch.randn(module.num_features))


def test_only_the_likeliest_dead_are_pushed() -> None:
    torch.manual_seed(0)
    model = Chain(8, 12)
    spread_scales(model)
    images, _ = batch()
    pruner = TargetSoftPruner(model, images, ratio=0.3, strength=2.0)
    assert pruner.count == 6
    extra = pruner.loss(torch.zeros(()))
    beta = torch.cat([model[1].bias, model[4].bias])
    gamma = torch.cat([model[1].weight, model[4].weight])
    dead = dead_probability(beta, gamma, MaskConfig())
    chosen = dead.argsort(descending=True)[:6]
    torch.testing.assert_close(extra, 2.0 * sparsity_terms(beta, gamma, MaskConfig())[chosen].sum())
    extra.backward()
    pushed = torch.cat([model[1].bias.grad, model[4].bias.grad]).nonzero().flatten()
    assert sorted(pushed.tolist()) == sorted(chosen.tolist())


class Stream(nn.Module):
    """The second convolution reads the first one's channels, and its own are added to them: a residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1)])
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(2))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norms[0](self.convs[0](x)))
        return self.head(F.relu(x + self.norms[1](self.convs[1](x))).mean((2, 3)))


def test_all_points_of_a_stream_are_pushed() -> None:
    torch.manual_seed(0)
    model = Stream()
    spread_scales(model)
    pruner = TargetSoftPruner(model, torch.randn(2, 3, 8, 8), ratio=0.5, strength=1.0, site_kinds="stream")
    extra = pruner.loss(torch.zeros(()))
    points = [(norm.bias, norm.weight) for norm in model.norms]
    dead = torch.stack([dead_probability(*point, MaskConfig()) for point in points]).amin(0)
    chosen = dead.argsort(descending=True)[:4]
    torch.testing.assert_close(extra, sum(sparsity_terms(*point, MaskConfig())[chosen].sum() for point in points))


def test_equals_are_chosen_over_the_whole_network() -> None:
    pruner = TargetSoftPruner(Chain(40, 40), batch()[0], ratio=0.5)
    pruner.loss(torch.zeros(())).backward()
    chosen = [int((bn.bias.grad != 0).sum()) for bn in (pruner.model[1], pruner.model[4])]  # type: ignore[index]
    assert sum(chosen) == 40
    assert min(chosen) > 10


def test_a_step_is_on_the_sparsity_alone_when_it_rose() -> None:
    torch.manual_seed(0)
    model = Chain(8)
    images, labels = batch()
    pruner = TargetSoftPruner(model, images, ratio=0.5, strength=0.5)
    optimizer = sgd(pruner, lr=0.0)

    def classifier_gradient() -> Tensor:
        optimizer.zero_grad()
        pruner.loss(F.cross_entropy(model(images), labels)).backward()
        gradient = model[-1].weight.grad
        assert gradient is not None  # also without a share in the loss, or DDP would wait for it
        optimizer.step()
        return gradient

    assert classifier_gradient().abs().sum() > 0  # the first step has nothing to compare with
    assert classifier_gradient().abs().sum() > 0  # equal is not risen
    with torch.no_grad():
        model[1].bias += 0.1
    assert classifier_gradient().abs().sum() == 0
    assert classifier_gradient().abs().sum() > 0


def test_dead_channels_that_fall_do_not_hide_that_living_ones_rise() -> None:
    torch.manual_seed(0)
    model = Chain(8)
    images, labels = batch()
    with torch.no_grad():  # two chosen channels are dead, two are not
        model[1].bias[:4] = torch.tensor([-9.0, -9.0, -0.5, -0.5])
        model[1].weight[:2] = 0.1
    pruner = TargetSoftPruner(model, images, ratio=0.5, strength=0.5)
    optimizer = sgd(pruner, lr=0.0)

    def task_counts() -> bool:
        optimizer.zero_grad()
        pruner.loss(F.cross_entropy(model(images), labels)).backward()
        optimizer.step()
        return bool(model[-1].weight.grad.abs().sum() > 0)

    assert task_counts()
    with torch.no_grad():
        model[1].bias[:2] -= 1.0
        model[1].bias[2:4] += 0.05
    assert not task_counts()
    with torch.no_grad():
        model[1].bias[:2] += 1.0
        model[1].bias[2:4] -= 0.05
    assert task_counts()


def test_a_real_run_ends_at_its_ratio() -> None:
    """A narrow VGG on the digits, in seconds."""
    torch.manual_seed(0)
    data = load_data("digits", device=torch.device("cpu"))
    model = models.VGG([[16], [32]], in_channels=1)
    pruner = TargetSoftPruner(model, data.example(2), ratio=0.4, strength=0.02)
    optimizer = torch.optim.SGD(pruner.parameter_groups(2e-4), lr=0.1, momentum=0.9, nesterov=True)
    pruner.attach(optimizer)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 300)
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        rows = torch.randint(len(data.train), (32,), generator=generator)
        images, labels = data.train.batch(rows)
        loss = pruner.loss(F.cross_entropy(model(images), labels))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    summary = pruner.summary()
    assert 1 - summary.channels / summary.dense_channels == pytest.approx(0.4, abs=0.01)
    images, labels = data.test.batch(torch.arange(len(data.test)))
    assert (model.eval()(images).argmax(1) == labels).float().mean() > 0.9
