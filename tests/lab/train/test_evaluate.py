"""Evaluation over a whole test set, and the time of a forward."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from softprune.lab.config.settings import RunConfig, TrainConfig
from softprune.lab.data import ArrayDataset, DataBundle, load_data
from softprune.lab.train import evaluate
from softprune.lab.train.evaluate import EvalTotals, Evaluator
from softprune.lab.world import World

WORLD = World(0, 1, torch.device("cpu"))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 8))


def bundle(count: int = 23) -> DataBundle:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(count, 1, 4, 4, generator=generator)
    data = ArrayDataset.from_arrays(images, torch.randint(0, 8, (count,), generator=generator))
    return DataBundle(train=data, test=data, num_classes=8)


def totals(model: nn.Module) -> EvalTotals:
    return Evaluator(bundle(), RunConfig(), WORLD)(model)


@pytest.mark.parametrize("batch_size", [1, 5, 23, 100])
def test_totals_are_exact_for_any_batch_size(batch_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "_BATCH", batch_size)
    model, data = network(), bundle().test
    with torch.no_grad():
        logits = model.eval()(data.images)
    best = logits.topk(5).indices == data.labels[:, None]
    found = totals(model)
    assert found.images == 23
    assert found.loss == pytest.approx(F.cross_entropy(logits, data.labels).item(), rel=1e-5)
    assert found.top1 == pytest.approx(100 * best[:, 0].float().mean().item())
    assert found.top5 == pytest.approx(100 * best.any(1).float().mean().item())


def test_modes_and_statistics_stay_and_later_weights_count() -> None:
    model = network().train()
    model[4].eval()
    statistics = model[1].running_mean.clone()
    before = totals(model)
    assert [module.training for module in (model, model[1], model[4])] == [True, True, False]
    assert model[1].running_mean.equal(statistics)
    with torch.no_grad():
        model[4].weight.mul_(-1)
    assert totals(model).loss != before.loss


@pytest.mark.parametrize(("is_fast", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_a_run_in_bf16_is_evaluated_in_it_only_where_the_device_has_it(
    is_fast: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluate, "has_fast_bf16", lambda device: is_fast)
    seen: list[torch.dtype] = []
    model = nn.Sequential(nn.Conv2d(1, 10, 8), nn.Flatten())  # torch 2.13 warns of linear layers in emulated bf16
    model.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    Evaluator(load_data("digits"), RunConfig(train=TrainConfig(precision="bf16")), WORLD)(model)
    assert set(seen) == {dtype}
