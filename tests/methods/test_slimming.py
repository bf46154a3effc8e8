"""Network Slimming: the penalty, the count, one threshold over the whole network, emptied layers."""

import pytest
import torch
import torch.nn.functional as F
from method_networks import Chain, Residual, batch, sgd, train
from torch import nn

from softprune.methods import SlimmingPruner


def test_the_largest_scales_of_the_whole_network_stay() -> None:
    torch.manual_seed(0)
    model = Chain(40, 60)
    for module in (model[1], model[4]):
        nn.init.uniform_(module.weight, -1, 1)
    masks = SlimmingPruner(model, batch()[0], ratio=0.8).masks()
    assert sum(int(mask.sum()) for mask in masks.values()) == 19  # int((1 - ratio) total), where 1 - ratio is 0.1999...
    scales = {name: model.get_submodule(name).weight.detach().abs() for name in masks}
    lowest_kept = min(scales[name][mask].min() for name, mask in masks.items())
    assert max(scales[name][~mask].max() for name, mask in masks.items()) < lowest_kept


def test_the_penalty_is_the_authors_sign_on_the_gradient() -> None:
    torch.manual_seed(0)
    plain, penalised = Chain(), Chain()
    plain.load_state_dict(penalised.state_dict())
    with torch.no_grad():
        for model in (plain, penalised):
            model[1].weight[:3] = torch.tensor([0.0, -0.5, 2.0])  # type: ignore[index]
    images, labels = batch()
    pruner = SlimmingPruner(penalised, images, strength=0.01)
    F.cross_entropy(plain(images), labels).backward()
    pruner.loss(F.cross_entropy(penalised(images), labels)).backward()
    for (name, ours), (_, reference) in zip(penalised.named_parameters(), plain.named_parameters(), strict=True):
        expected = reference.grad
        if name in ("1.weight", "4.weight"):
            expected = expected + 0.01 * torch.sign(reference)
        torch.testing.assert_close(ours.grad, expected)


def test_the_model_is_whole_until_decided_and_masked_from_then_on() -> None:
    torch.manual_seed(0)
    model = Chain()
    images, _ = batch()
    dense = model.eval()(images)
    pruner = SlimmingPruner(model, images, ratio=0.5)
    assert not pruner.decided
    torch.testing.assert_close(model(images), dense)
    assert pruner.summary().channels == 10
    would_be = pruner.masks()
    assert all(mask.equal(would_be[name]) for name, mask in pruner.decide().items())
    assert pruner.decided
    assert float(pruner.strength) == 0
    torch.testing.assert_close(model(images), pruner.compact()(images))
    assert not torch.allclose(model(images), dense)


def test_a_settled_decision_survives_further_training() -> None:
    torch.manual_seed(0)
    pruner = SlimmingPruner(Chain(), batch()[0], ratio=0.5)
    optimizer = sgd(pruner)
    train(pruner, optimizer)
    settled = pruner.decide()
    dropped = {name: ~mask for name, mask in settled.items()}
    # Weight decay moves a dropped scale, but no gradient does: it cannot come back.
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.0
    optimizer.state.clear()
    before = {name: pruner.model.get_submodule(name).weight.detach().clone() for name in settled}
    train(pruner, optimizer, first=2)
    for name, mask in dropped.items():
        assert pruner.model.get_submodule(name).weight[mask].equal(before[name][mask])
    assert all(mask.equal(settled[name]) for name, mask in pruner.masks().items())


@pytest.mark.parametrize("network", [Chain, Residual])
def test_an_emptied_layer_is_no_error(network: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = network()
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    nn.init.constant_(norms[1].weight, 1e-6)
    pruner = SlimmingPruner(model, batch()[0], ratio=0.6)
    pruner.decide()
    kept = {site.name: site.kept for site in pruner.summary().sites}
    # In the chain every path passes there, and one channel stays; in the residual network the branch goes.
    assert kept[pruner.sites[1].name] == (1 if network is Chain else 0)
    images, _ = batch(1)
    torch.testing.assert_close(pruner.compact().eval()(images), model.eval()(images))


def test_scales_start_where_the_authors_start_them_but_not_again_after_a_resume() -> None:
    pruner = SlimmingPruner(Chain(8), batch()[0], initial_scale=0.5)
    optimizer = sgd(pruner)
    assert (pruner.model[1].weight == 0.5).all()  # type: ignore[index]
    train(pruner, optimizer)
    weights = pruner.model[1].weight.detach().clone()  # type: ignore[index]
    again = SlimmingPruner(Chain(8), batch()[0], initial_scale=0.5)
    again.model.load_state_dict(pruner.model.state_dict())
    again.load_state_dict(pruner.state_dict())
    sgd(again)
    assert again.model[1].weight.equal(weights)  # type: ignore[index]
