"""SFP: which filters are zeroed, when, and what evaluation and cut make of them."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from method_networks import Chain, PreActivation, Residual, batch, sgd, train
from torch import Tensor, nn

from softprune.errors import CheckpointError, ConfigError, ModelError
from softprune.methods import FpgmPruner, L1Pruner, SfpPruner

IMAGE = torch.zeros(2, 3, 32, 32)


def test_the_norm_is_that_of_the_paper() -> None:
    model = Chain(8)
    pruner = SfpPruner(model, batch()[0], ratio=0.4)
    with torch.no_grad():
        model[0].weight.zero_()
        model[0].weight[0, 0], model[0].weight[1, 0, 0, 0] = 0.5, 2.0  # L1 would drop the other one
    assert pruner.scores(model)["1"][:2].tolist() == pytest.approx([1.5, 2.0])


def test_the_smallest_norms_are_zeroed_before_training_and_after_every_epoch() -> None:
    torch.manual_seed(0)
    model = Chain(8)
    conv = model[0]
    assert isinstance(conv, nn.Conv2d)
    nn.init.constant_(model[1].bias, 0.1)  # a ReLU at exactly zero would pass no gradient
    norms = conv.weight.detach().flatten(1).norm(dim=1)
    pruner = SfpPruner(model, batch()[0], ratio=0.5)
    assert not (conv.weight.flatten(1) == 0).all(1).any()
    optimizer = sgd(pruner)
    zeroed = (conv.weight.flatten(1) == 0).all(1)
    assert sorted(norms[zeroed].tolist()) == sorted(norms.tolist())[:4]
    train(pruner, optimizer)
    assert not (conv.weight.flatten(1) == 0).all(1).any()  # they have grown back
    pruner.end_epoch(0)
    assert int((conv.weight.flatten(1) == 0).all(1).sum()) == 4


@pytest.mark.parametrize("network", [Chain, Residual, PreActivation])
def test_strict_evaluation_is_what_is_cut_and_the_authors_is_not(network: type[nn.Module]) -> None:
    images, _ = batch()
    outputs = {}
    for evaluation in ("strict", "authors"):
        torch.manual_seed(0)
        pruner = SfpPruner(network(), images, ratio=0.5, evaluation=evaluation)  # type: ignore[arg-type]
        optimizer = sgd(pruner)
        train(pruner, optimizer, 3)
        pruner.end_epoch(0)
        outputs[evaluation] = pruner.model.eval()(images)
        cut = pruner.compact().eval()(images)
        outputs[f"{evaluation} cut"] = cut
    torch.testing.assert_close(outputs["strict"], outputs["strict cut"])
    torch.testing.assert_close(outputs["strict cut"], outputs["authors cut"])
    assert not torch.allclose(outputs["authors"], outputs["authors cut"])


def test_shares_by_name() -> None:
    images, _ = batch()
    pruner = SfpPruner(Residual(), images, ratio={"blocks.*.bn1": 0.5, "blocks.2.bn1": 0.25})
    sgd(pruner)
    kept = {name: int(mask.sum()) for name, mask in pruner.masks().items() if not mask.all()}
    assert kept == {"blocks.0.bn1": 4, "blocks.1.bn1": 6, "blocks.2.bn1": 9}
    with pytest.raises(ConfigError, match=r"Got 'blocks.9.bn1', which matches none; sites are 'blocks.\d.bn1'"):
        SfpPruner(Residual(), images, ratio={"blocks.9.bn1": 0.5})


def test_a_network_without_filters_that_feed_a_batchnorm() -> None:
    with pytest.raises(ModelError, match="its channels are not the filters of a single layer"):
        SfpPruner(nn.Sequential(nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 4, 3)), IMAGE)


OPTIONS = {SfpPruner: {"ratio": 0.4}, L1Pruner: {"ratio": 0.3}, FpgmPruner: {"ratio_dist": 0.4}}


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("method", OPTIONS)
def test_the_filters_of_transposed_convolutions_are_ranked(method: Any, groups: int) -> None:
    torch.manual_seed(0)
    up = nn.ConvTranspose2d(4, 6, 2, stride=2, groups=groups, bias=False)
    weak = [False, True, False, False, True, False]
    with torch.no_grad():
        for channel in (1, 4):
            group, column = divmod(channel, 6 // groups)
            up.weight[group * 4 // groups : (group + 1) * 4 // groups, column] *= 1e-3

    def zeroed(weight: Tensor) -> list[bool]:
        output = F.conv_transpose2d(torch.ones(1, 4, 1, 1), weight, stride=2, groups=groups)
        return (output.abs().amax((0, 2, 3)) == 0).tolist()

    model = nn.Sequential(nn.Conv2d(3, 4, 1), up, nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 2, 1))
    pruner = method(model, IMAGE, **OPTIONS[method])
    up.weight.grad = up.weight.detach().clone()
    sgd(pruner)  # SFP and FPGM set filters to zero
    assert (~pruner.masks()["2"]).tolist() == weak
    if method is not L1Pruner:
        assert zeroed(up.weight) == weak
    if method is FpgmPruner:
        pruner.before_step()
        assert zeroed(up.weight.grad) == weak


def test_a_state_that_comes_too_late_is_refused() -> None:
    torch.manual_seed(0)
    pruner = SfpPruner(Chain(), batch()[0])
    train(pruner, sgd(pruner))
    late = SfpPruner(Chain(), batch()[0])
    sgd(late)
    with pytest.raises(CheckpointError, match="create the pruner, load, then attach"):
        late.load_state_dict(pruner.state_dict())
