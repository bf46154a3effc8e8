"""Evaluation over a whole test set."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from softprune.distributed import World
from softprune.lab.config.settings import RunConfig, TrainConfig
from softprune.lab.data import ArrayDataset, load_data
from softprune.lab.train import evaluate as eval_step
from softprune.lab.train.evaluate import EvalStep, Evaluator


def _network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 8))


def _data(count=23):
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(count, 1, 4, 4, generator=generator)
    return ArrayDataset.from_arrays(images, torch.randint(0, 8, (count,), generator=generator))


def _expected(model, data):
    with torch.no_grad():
        logits = model.eval()(data.images)
    best = logits.topk(5).indices == data.labels[:, None]
    loss = F.cross_entropy(logits, data.labels)
    return loss.item(), 100 * best[:, 0].float().mean().item(), 100 * best.any(1).float().mean().item()


@pytest.mark.parametrize("batch_size", [1, 5, 23, 100])
def test_totals_are_exact_for_any_batch_size(batch_size):
    model, data = _network(), _data()
    totals = EvalStep(model, data, batch_size=batch_size)()
    assert totals.images == 23
    assert (totals.loss, totals.top1, totals.top5) == pytest.approx(_expected(model, data), rel=1e-5)


def test_the_networks_mode_and_statistics_stay_as_they_were():
    model = _network().train()
    model[4].eval()
    statistics = model[1].running_mean.clone()
    EvalStep(model, _data())()
    assert model.training
    assert model[1].training
    assert not model[4].training, "a part that was frozen stays so"
    assert torch.equal(model[1].running_mean, statistics)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_network_is_taken_as_it_is_at_each_call():
    model, data = _network(), _data()
    evaluate = EvalStep(model, data, batch_size=10, channels_last=True)
    evaluate()
    with torch.no_grad():
        model[4].weight.mul_(-1)
    assert evaluate().loss == pytest.approx(_expected(model, data)[0], rel=1e-5)


def test_a_network_with_equal_outputs_is_not_praised():
    model, data = _network(), _data()
    nn.init.zeros_(model[4].weight)
    nn.init.zeros_(model[4].bias)
    assert EvalStep(model, data)().top1 < 40
    nn.init.constant_(model[4].bias, float("nan"))
    assert EvalStep(model, data)().top1 < 40


def test_images_from_folders(tmp_path):
    Image = pytest.importorskip("PIL.Image", reason='the "vision" extra is not installed')
    for split in ("train", "val"):
        for name in ("dark", "light"):
            (tmp_path / split / name).mkdir(parents=True)
            for i in range(3):
                grey = i if name == "dark" else 255 - i
                Image.new("RGB", (20, 20), (grey, grey, grey)).save(tmp_path / split / name / f"{i}.png")
    bundle = load_data("folder", tmp_path, image_size=8)
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 2))
    with torch.no_grad():
        model[1].weight[0], model[1].weight[1] = -1, 1
    totals = EvalStep(model, bundle.test, batch_size=4)()
    assert (totals.images, totals.top1, totals.top5) == (6, 100, None)  # one of two classes is always among five


def test_a_recording_is_renewed_when_tensors_or_gates_change():
    model = _network()
    before = eval_step._tensors_and_gates(model)
    assert eval_step._tensors_and_gates(model) == before
    with torch.no_grad():
        model[4].weight.mul_(2)
    assert eval_step._tensors_and_gates(model) == before
    model[4].weight = nn.Parameter(torch.randn(8, 16))
    assert eval_step._tensors_and_gates(model) != before

    class Gate:
        override = None

    gate = model[1].gate = Gate()
    gate.override = None
    plain = eval_step._tensors_and_gates(model)
    gate.override = torch.ones(4, dtype=torch.bool)
    assert eval_step._tensors_and_gates(model) != plain


def test_recorded_evaluation_counts_every_batch_once(monkeypatch):
    """A CUDA graph runs its body as warm-up, undoes that, and is then replayed for the first batch too."""
    recordings = []

    def fake_capture(body, device, *, trial, undo):
        for _ in range(3):
            trial()
        undo()
        recordings.append(body)
        return type("Graph", (), {"replay": staticmethod(body)})

    monkeypatch.setattr(eval_step, "capture_graph", fake_capture)
    model, data = _network(), _data()
    evaluate = EvalStep(model, data, batch_size=10)
    evaluate._wants_graph = True
    for _ in range(2):
        totals = evaluate()
        assert totals.images == 23
        assert totals.loss == pytest.approx(_expected(model, data)[0], rel=1e-5)
    assert len(recordings) == 1


@pytest.mark.parametrize(("is_fast", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_a_run_in_bf16_is_evaluated_in_it_only_where_the_device_has_it(is_fast, dtype, monkeypatch):
    monkeypatch.setattr(eval_step, "has_fast_bf16", lambda device: is_fast)
    data, seen = load_data("digits"), []
    network = nn.Sequential(nn.Conv2d(1, 10, 8), nn.Flatten())  # torch 2.13 warns of linear layers in emulated bf16
    network.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    config = RunConfig(train=TrainConfig(precision="bf16"))
    Evaluator(data, config, World(0, 1, torch.device("cpu")))(network)
    assert set(seen) == {dtype}
