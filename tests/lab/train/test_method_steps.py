"""Every method in the trainer's steps: eager, compiled, and recorded, all with the same outcome."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from softprune.lab.config.settings import Mode, OptimizerConfig, TrainConfig
from softprune.lab.data import ArrayDataset, Augmentation, DataBundle, EpochSampler
from softprune.lab.train.step import TrainStep, make_optimizer
from softprune.methods import REGISTRY, RandomPruner

STRONG = {"scp": 0.1, "scp-target": 0.1, "slimming": 0.01, "sss": 1.0, "variational": 1e-5}


def network() -> nn.Module:
    model = nn.Sequential(
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
    # A filter that is set to zero comes out of its BatchNorm as the shift. Were that zero, too, then rounding would
    # decide on which side of the ReLU's kink it lies.
    for bn in (model[1], model[4]):
        nn.init.uniform_(bn.bias, -0.5, 0.5)
    return model


def trained(method: str, device: torch.device, mode: Mode) -> tuple[str | None, Tensor]:
    """(how the steps ran, all numbers that two epochs leave)."""
    images = torch.randn(28, 1, 6, 6, generator=torch.Generator().manual_seed(1))
    data = ArrayDataset.from_arrays(images, torch.arange(28) % 3, device=device)
    bundle = DataBundle(train=data, test=data, num_classes=3, augmentation=Augmentation(pad=1, flip=True))
    torch.manual_seed(0)
    model, example = network().to(device), bundle.example(device=device)
    settings: dict[str, Any] = {"seed": 4} | ({"strength": STRONG[method]} if method in STRONG else {})
    if method == "scratch":
        settings = {"plan": RandomPruner(network(), bundle.example(), ratio=0.5).plan()}
    if method == "scp with a target":
        settings = {"seed": 4, "target": {"macs": 0.5}, "total_steps": 6}
    pruner = REGISTRY[method.partition(" ")[0]](model, example, **settings)
    pruner.updates_on_step = False
    optimizer = make_optimizer(OptimizerConfig(), pruner.parameter_groups(weight_decay=2e-4))
    pruner.attach(optimizer)
    batches = bundle.batches(EpochSampler(size=28, batch_size=8, seed=3), device)
    step = TrainStep(
        model,
        optimizer,
        batches,
        schedule=lambda step: 0.1 if step < 5 else 0.01,
        pruner=pruner,
        train=TrainConfig(mode=mode),
    )
    for epoch in range(2):
        for position in step.epoch(epoch):
            pruner.update_strength(epoch * step.steps + position + 1)
        pruner.end_epoch(epoch)
    tensors = [*model.state_dict().values(), *_tensors(pruner.state_dict()), *pruner.decide().values()]
    return step.mode, torch.cat([tensor.detach().double().flatten().cpu() for tensor in tensors])


def _tensors(state: Any) -> list[Tensor]:
    if isinstance(state, dict):
        return [tensor for value in state.values() for tensor in _tensors(value)]
    return [state] if isinstance(state, Tensor) else []


@pytest.mark.usefixtures("played_graphs")
@pytest.mark.parametrize("method", ["scp", "sfp", "variational"])
def test_compiled_and_recorded_steps_are_the_eager_ones(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrainStep, "backend", "aot_eager")
    cpu = torch.device("cpu")
    _, eager = trained(method, cpu, mode="eager")
    mode, recorded = trained(method, cpu, mode="compile")
    assert mode == "compile"
    if method == "scp":
        # The gradients of masks and sparsity loss meet in another order where the masks are a graph of their own.
        torch.testing.assert_close(recorded, eager, rtol=1e-4, atol=1e-6)
    else:
        assert recorded.equal(eager)


class _Reads(TorchDispatchMode):
    """Notes which storages are read that no operation under it has made."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, int]] = []
        self._made: set[int] = set()
        self._kept_alive: list[Any] = []  # so that no address comes twice

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = self._storages((args, kwargs or {}))
        self.found += [(str(function), storage) for storage in given if storage not in self._made]
        result = function(*args, **(kwargs or {}))
        self._made.update(set(self._storages(result)) - set(given))
        return result

    def _storages(self, values: Any) -> list[int]:
        tensors = [value for value in pytree.tree_leaves(values) if isinstance(value, Tensor)]
        self._kept_alive += [tensor.untyped_storage() for tensor in tensors]
        return [tensor.untyped_storage()._cdata for tensor in tensors]


@pytest.mark.parametrize("method", [*REGISTRY, "scp with a target"])
def test_every_step_reads_the_same_memory(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA graph reads where the recorded step has read: nothing there may be replaced by another tensor."""
    reads: list[_Reads] = []
    plain_step = TrainStep._step

    def watched(step: TrainStep) -> None:
        with _Reads() as seen:
            plain_step(step)
        reads.append(seen)

    monkeypatch.setattr(TrainStep, "_step", watched)
    trained(method, torch.device("cpu"), mode="eager")
    assert len(reads) >= 6
    # What is made at first use is made in the trial steps, before anything is recorded.
    recorded, *replayed = reads[1:]
    assert recorded.found
    for step in replayed:
        assert step.found == recorded.found


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::UserWarning:torch")  # Inductor's advice: TF32, split reductions
@pytest.mark.parametrize("method", REGISTRY)
def test_a_gpu_records_the_steps_of_every_method(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # methods that rank filters magnify rounding
    device = torch.device("cuda")
    _, eager = trained(method, device, mode="eager")
    ran, recorded = trained(method, device, mode="compile")
    assert ran == "compile"
    torch.testing.assert_close(recorded, eager, rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
def test_a_gpu_trains_widths_that_are_no_multiples() -> None:
    """Half of ShuffleNetV2's 116 channels: scales and shifts of what follows begin between two reads of cuDNN."""
    model = nn.Sequential(
        nn.Conv2d(3, 58, 1), nn.BatchNorm2d(58), nn.ReLU(), nn.Conv2d(58, 116, 1), nn.BatchNorm2d(116)
    )
    model = nn.Sequential(model, nn.ReLU()).to("cuda", memory_format=torch.channels_last)
    images = torch.randn(128, 3, 16, 16, device="cuda").contiguous(memory_format=torch.channels_last)
    pruner = REGISTRY["scp"](model, images[:2])
    with torch.autocast("cuda", torch.bfloat16):
        pruner.loss(model(images).float().mean()).backward()
    assert model.eval()(images).isfinite().all()
    offsets = [each.weight.storage_offset() % 4 for each in pruner.site_masks._split(pruner.site_masks._draw(False))]
    assert not any(offsets)
