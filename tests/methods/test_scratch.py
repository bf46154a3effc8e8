"""Same shape from scratch: masked training is the compact network's own."""

from pathlib import Path

import pytest
import torch
from method_networks import Chain, Residual, batch, sgd, train
from torch import nn

from softprune import save
from softprune.cut import PrunePlan, apply_plan
from softprune.errors import ConfigError, PlanError
from softprune.methods import RandomPruner, ScratchPruner, SfpPruner


def half(network: type[nn.Module] = Chain, **options: object) -> PrunePlan:
    torch.manual_seed(0)
    return RandomPruner(network(), batch()[0], ratio=0.5, **options).plan()  # type: ignore[arg-type]


@pytest.mark.parametrize("network", [Chain, Residual])
def test_it_trains_as_the_compact_network_would(network: type[nn.Module]) -> None:
    torch.manual_seed(1)
    model = network()
    plan = half(network)
    small = apply_plan(plan, model)
    pruner = ScratchPruner(model, batch()[0], plan=plan)
    optimizer = sgd(pruner)
    reference = torch.optim.SGD(small.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.0
    losses = train(pruner, optimizer, 3)
    small.train()
    expected = []
    for step in range(3):
        images, labels = batch(step)
        loss = nn.functional.cross_entropy(small(images), labels)
        reference.zero_grad()
        loss.backward()
        reference.step()
        expected.append(loss.item())
    assert losses == pytest.approx(expected, rel=1e-4)
    images, _ = batch(9)
    torch.testing.assert_close(pruner.compact().eval()(images), small.eval()(images), rtol=1e-3, atol=1e-4)


def test_a_plan_from_a_folder_also_with_batchnorms_that_no_activation_follows(tmp_path: Path) -> None:
    torch.manual_seed(0)
    images, _ = batch()
    pruner = SfpPruner(Residual(), images, ratio=0.5)
    sgd(pruner)
    save(pruner.compact(), tmp_path / "run" / "compact")
    for path in (tmp_path / "run", tmp_path / "run" / "compact.safetensors"):
        again = ScratchPruner(Residual(), images, plan=path)
        assert all(mask.equal(pruner.masks()[name]) for name, mask in again.masks().items())
        assert again.plan().macs == pruner.plan().macs


def test_a_network_that_was_cut_already_keeps_its_shape() -> None:
    """What the trainer does with train.compact_at."""
    plan = half()
    torch.manual_seed(1)
    small = ScratchPruner(Chain(), batch()[0], plan=plan).compact()
    again = ScratchPruner(small, batch()[0], plan=plan)
    assert all(mask.all() for mask in again.masks().values())
    assert [len(mask) for mask in again.masks().values()] == [4, 6]


def test_the_plan_must_be_given_and_fit() -> None:
    images, _ = batch()
    with pytest.raises(ConfigError, match="pass the folder of a finished run"):
        ScratchPruner(Chain(), images)
    with pytest.raises(PlanError, match="Residual"):
        ScratchPruner(Residual(), images, plan=half())
    with pytest.raises(PlanError):
        ScratchPruner(Chain(10, 12), images, plan=half())
    with pytest.raises(PlanError, match="Got that of another one"):
        ScratchPruner(apply_plan(half(), Chain()), images, plan=half(Residual))
