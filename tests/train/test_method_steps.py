"""Every method in the trainer's steps: eager, compiled, and recorded, all with the same outcome."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from softprune.data import ArrayDataset, Augmentation, DataBundle
from softprune.methods import REGISTRY, RandomPruner
from softprune.train import step as step_module
from softprune.train.feed import make_feed
from softprune.train.optim import make_sgd
from softprune.train.sampler import EpochSampler
from softprune.train.schedule import Schedule
from softprune.train.step import StepOptions, TrainStep

STRONG = {"scp": 0.1, "scp-target": 0.1, "slimming": 0.01, "sss": 1.0, "variational": 1e-5}


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 3),
    )


def trained(method: str, device: torch.device, **options: Any) -> tuple[str | None, Tensor]:
    """(how the steps ran, all numbers that two epochs leave)."""
    images = torch.randn(28, 1, 6, 6, generator=torch.Generator().manual_seed(1))
    data = ArrayDataset.from_arrays(images, torch.arange(28) % 3, device=device)
    bundle = DataBundle(
        name="own",
        num_classes=3,
        input_shape=(1, 6, 6),
        train=data,
        test=data,
        augmentation=Augmentation(pad=1, flip=True),
    )
    torch.manual_seed(0)
    model, example = network().to(device), bundle.example(device=device)
    settings: dict[str, Any] = {"strength": STRONG[method]} if method in STRONG else {}
    if method == "scratch":
        settings["plan"] = RandomPruner(network(), bundle.example(), ratio=0.5).plan()
    pruner = REGISTRY[method].build(model, example, seed=4, **settings)
    optimizer = make_sgd(pruner.parameter_groups(weight_decay=2e-4), lr=0.1)
    pruner.attach(optimizer)
    feed = make_feed(bundle, EpochSampler(size=28, batch_size=8, seed=3), device=device)
    step = TrainStep(
        model,
        optimizer,
        feed,
        schedule=Schedule(base=0.1, kind="step", milestones=(5,)),
        pruner=pruner,
        strength=Schedule(base=STRONG[method], warmup_steps=3) if pruner.penalised else None,
        options=StepOptions(**options),
    )
    for epoch in range(2):
        for _ in step.epoch(epoch):
            pass
        pruner.end_epoch(epoch)
    tensors = [*model.state_dict().values(), *_tensors(pruner.state_dict()), *pruner.decide().values()]
    return step.mode, torch.cat([tensor.detach().double().flatten().cpu() for tensor in tensors])


def _tensors(state: Any) -> list[Tensor]:
    if isinstance(state, dict):
        return [tensor for value in state.values() for tensor in _tensors(value)]
    return [state] if isinstance(state, Tensor) else []


@pytest.mark.parametrize("method", REGISTRY)
def test_compiled_and_recorded_steps_are_the_eager_ones(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph is played on the CPU: warm-up, undo, then replays. What the warm-up does must leave no trace."""

    def capture(body: Any, device: torch.device, *, trial: Any, undo: Any) -> Any:
        for _ in range(3):
            trial()
        undo()
        return type("Graph", (), {"replay": staticmethod(body)})

    monkeypatch.setattr(step_module, "capture_graph", capture)
    monkeypatch.setattr(TrainStep, "_why_not", lambda self, mode: None)
    cpu = torch.device("cpu")
    _, eager = trained(method, cpu, mode="eager")
    mode, recorded = trained(method, cpu, mode="compile+cuda_graph", compile_backend="aot_eager")
    assert mode == "compile+cuda_graph"
    torch.testing.assert_close(recorded, eager, rtol=1e-4, atol=1e-6)  # sums may run in another order


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.filterwarnings("ignore::UserWarning:torch")  # Inductor's advice: TF32, split reductions
@pytest.mark.parametrize("mode", ["cuda_graph", "compile+cuda_graph"])
@pytest.mark.parametrize("method", REGISTRY)
def test_a_gpu_records_the_steps_of_every_method(method: str, mode: Any) -> None:
    device = torch.device("cuda")
    _, eager = trained(method, device, mode="eager")
    ran, recorded = trained(method, device, mode=mode)
    assert ran == mode
    torch.testing.assert_close(recorded, eager, rtol=1e-3, atol=1e-3)
