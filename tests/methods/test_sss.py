"""SSS: the proximal step by hand, factors on residual branches and on channels, and what zero factors cut."""

import pytest
import torch
import torch.nn.functional as F
from method_networks import Chain, PreActivation, Residual, batch, sgd, train
from torch import nn

from softprune import models
from softprune.methods import SssPruner
from softprune.methods.learned import proximal_step_


def test_the_proximal_step_against_a_sequence_by_hand() -> None:
    """Rate 0.1, momentum 0.5, strength 2: the threshold is 0.2."""
    factor, velocity = torch.tensor([1.0]), torch.tensor([0.0])
    by_hand = [
        # gradient, then v and f worked out on paper
        (1.0, -0.3, 0.55),  # 1 - 0.1 = 0.9 -> z 0.7; v = 0.7 - 1; f = 0.7 - 0.15
        (-2.0, -0.15, 0.475),  # 0.55 + 0.2 = 0.75 -> z 0.55; v = 0 - 0.15; f = 0.55 - 0.075
        (4.0, -0.55, 0.0),  # 0.475 - 0.4 = 0.075 -> z 0; v = -0.475 - 0.075; f = max(0, -0.275)
        (-3.0, -0.175, 0.0125),  # 0 + 0.3 -> z 0.1; v = 0.1 - 0.275; f = 0.1 - 0.0875: it comes back
        (9.0, -0.7875, 0.0),  # 0.0125 - 0.9 = -0.8875 -> z -0.6875; v = -0.7 - 0.0875; below zero
    ]
    for gradient, v, f in by_hand:
        proximal_step_(factor, velocity, torch.tensor([gradient]), 0.1, 0.5, 2.0)
        torch.testing.assert_close(velocity, torch.tensor([v]))
        torch.testing.assert_close(factor, torch.tensor([f]))


def test_blocks_where_there_are_residual_branches_and_channels_elsewhere() -> None:
    images, _ = batch()
    blocks, channels = (SssPruner(network(), images).site_masks for network in (Residual, Chain))
    assert (len(blocks.value), blocks.scaled) == (3, {f"blocks.{i}.bn2" for i in range(3)})
    assert (len(channels.value), channels.scaled) == (20, {"1", "4"})


def test_the_papers_preactivation_network() -> None:
    pruner = SssPruner(models.resnet20(), torch.zeros(2, 3, 32, 32))
    assert len(pruner.branches) == 9
    # The first block of a stage feeds its shortcut from its first BatchNorm, which therefore is not in the branch.
    assert pruner.branches[3:5] == [("stages.1.0.bn2",), ("stages.1.1.bn1", "stages.1.1.bn2")]


@pytest.mark.parametrize("network", [Residual, PreActivation])
def test_the_factor_multiplies_the_whole_branch(network: type[nn.Module]) -> None:
    """Also in a pre-activation block, where a convolution stands behind it."""
    torch.manual_seed(0)
    images, _ = batch()
    plain, factored = network().eval(), network().eval()
    plain.load_state_dict(factored.state_dict())
    pruner = SssPruner(factored, images)
    with torch.no_grad():
        pruner.site_masks.value.add_(torch.arange(len(pruner.branches)) - 0.7)
    plain_blocks = plain.get_submodule("blocks")
    for number, block in enumerate(plain_blocks.children()):
        last = block.get_submodule("bn2" if network is Residual else "conv2")
        last.register_forward_hook(lambda m, args, out, f=0.3 + number: out * f)
    torch.testing.assert_close(factored(images), plain(images))


def test_a_step_descends_on_the_factors_gradient() -> None:
    torch.manual_seed(0)
    images, labels = batch()
    pruner = SssPruner(Chain(), images, strength=0.5)
    optimizer = torch.optim.SGD(pruner.model.parameters(), lr=0.1, momentum=0.9)
    pruner.attach(optimizer)
    factor = pruner.site_masks.value
    loss = pruner.loss(F.cross_entropy(pruner.model(images), labels))
    (gradient,) = torch.autograd.grad(loss, factor, retain_graph=True)
    gradient = gradient[pruner.site_masks.slices["1"]]
    loss.backward()
    optimizer.step()
    shrunk = (1 - 0.1 * gradient - 0.05).clamp(min=0)
    torch.testing.assert_close(factor[pruner.site_masks.slices["1"]], shrunk + 0.9 * (shrunk - 1))
    assert factor.grad is None


@pytest.mark.parametrize("network", [Residual, PreActivation, Chain])
def test_zero_factors_are_cut_and_the_others_folded_in(network: type[nn.Module]) -> None:
    torch.manual_seed(0)
    images, _ = batch()
    model = network()
    pruner = SssPruner(model, images, strength=1.0)
    train(pruner, sgd(pruner), 4)
    with torch.no_grad():
        for number, here in enumerate({here.start: here for here in pruner.site_masks.places}.values()):
            factors = pruner.site_masks.value[here]
            factors[: max(1, len(factors) // 2)] = 0.7 * (number % 2)
    masked = model.eval()(images)
    compact = pruner.compact().eval()
    torch.testing.assert_close(compact(images), masked)
    plan = pruner.plan()
    assert plan.macs < plan.dense_macs
    if pruner.branches:
        assert all(not pruner.masks()[name].any() for name in pruner.branches[0])
    dense = pruner.detach()
    torch.testing.assert_close(dense.eval()(images), masked)
