"""The Lightning callback prunes while a Trainer trains, resumes, and leaves the module as it was."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from softprune.errors import ConfigError

L: Any = None
Manual: Any = None
Module: Any = None
SoftPruning: Any = None


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    """Import Lightning for the first test that runs, and not while tests are collected: it takes seconds."""
    global L, Manual, Module, SoftPruning
    pytest.importorskip(
        "torchvision", reason='the "vision" extra is not installed'
    )  # torchmetrics, which Lightning imports, looks for it
    L = pytest.importorskip("lightning.pytorch", reason='the "lightning" extra is not installed')
    from lightning_module import Manual, Module

    from softprune.integrations.lightning import SoftPruning


pytestmark = [
    # Lightning's own, about the machine and about itself.
    pytest.mark.filterwarnings("ignore:The '.*dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec."),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended"),
]


def _loader() -> DataLoader:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(24, 1, 6, 6, generator=generator)
    return DataLoader(TensorDataset(images, torch.arange(24) % 3), batch_size=8)


def _trainer(folder: Path, epochs: int = 2, **options: object) -> Any:
    settings = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, **options}
    return L.Trainer(max_epochs=epochs, accelerator="cpu", devices=1, default_root_dir=folder, **settings)


@pytest.mark.parametrize("as_dict", [False, True])
def test_prunes_and_cuts(as_dict: bool, tmp_path: Path) -> None:
    module = Module(as_dict)
    # So strong that the sparsity loss outweighs the task at once.
    pruning = SoftPruning(torch.randn(2, 1, 6, 6), strength=1.0)
    trainer = _trainer(tmp_path, epochs=8, enable_checkpointing=False, callbacks=[pruning])
    trainer.fit(module, _loader())
    assert int(pruning.pruner.clock.step) == 24
    assert 0 < trainer.callback_metrics["softprune/channels_kept"] < 1
    compact = pruning.compact()
    assert sum(p.numel() for p in compact.parameters()) < sum(p.numel() for p in module.model.parameters())
    module.eval()
    x = torch.randn(3, 1, 6, 6)
    torch.testing.assert_close(compact.eval()(x), module.model(x))
    fours = pruning.compact(round_to=4)
    assert all(part.out_channels % 4 == 0 for part in fours.modules() if isinstance(part, nn.Conv2d))
    torch.testing.assert_close(fours.eval()(x), module.model(x))
    assert "training_step" not in vars(module)


def test_averaged_weights_are_evaluated_and_cut(tmp_path: Path) -> None:
    module, pruning = Module(), SoftPruning(torch.randn(2, 1, 6, 6), target={"macs": 0.5})
    average = L.callbacks.WeightAveraging(use_buffers=True)
    _trainer(tmp_path, enable_checkpointing=False, callbacks=[pruning, average]).fit(module, _loader())
    compact = pruning.compact().eval()
    x = torch.randn(3, 1, 6, 6)
    torch.testing.assert_close(compact(x), module.eval().model(x))


def test_resumes_from_lightnings_checkpoint(tmp_path: Path) -> None:
    def fit(epochs: int, checkpoint: Path | None = None) -> tuple[Module, SoftPruning, L.Trainer]:
        module, pruning = Module(), SoftPruning(torch.randn(2, 1, 6, 6), strength=1e-2, seed=3)
        trainer = _trainer(tmp_path, epochs, enable_checkpointing=False, callbacks=[pruning])
        trainer.fit(module, _loader(), ckpt_path=checkpoint, weights_only=False)
        return module, pruning, trainer

    whole, whole_pruning, _ = fit(4)
    _, _, half = fit(2)
    half.save_checkpoint(tmp_path / "half.ckpt")
    resumed, pruning, _ = fit(4, tmp_path / "half.ckpt")
    assert int(pruning.pruner.clock.step) == int(whole_pruning.pruner.clock.step) == 12
    assert resumed.tasks == whole.tasks[6:]
    for name, tensor in whole.model.state_dict().items():
        torch.testing.assert_close(resumed.model.state_dict()[name], tensor, rtol=0, atol=0)


def test_a_checkpoint_is_evaluated_and_cut_with_its_own_masks(tmp_path: Path) -> None:
    """After the training has gone on."""

    class Evaluated(Module):
        def predict_step(self, batch: list[Tensor], index: int) -> Tensor:
            return self.model(batch[0])

    pruning, path = SoftPruning(torch.randn(2, 1, 6, 6), target={"macs": 0.5}, total_steps=12), tmp_path / "early.ckpt"
    trainer = _trainer(tmp_path, 1, enable_checkpointing=False, callbacks=[pruning])
    module = Evaluated()
    trainer.fit(module, _loader())
    trainer.save_checkpoint(path)
    masks, expected = pruning.pruner.masks(), torch.cat(trainer.predict(module, _loader()))
    trainer = _trainer(tmp_path, 3, enable_checkpointing=False, callbacks=[pruning])
    trainer.fit(module, _loader())
    assert pruning.pruner.status.finalised_step is not None
    found = torch.cat(trainer.predict(module, _loader(), ckpt_path=path, weights_only=False))
    assert pruning.pruner.status.finalised_step is None
    assert torch.equal(found, expected)
    assert all(torch.equal(mask, masks[name]) for name, mask in pruning.pruner.masks().items())
    compact = pruning.compact().eval()
    with torch.no_grad():
        cut = torch.cat([compact(images) for images, _ in _loader()])
        masked = torch.cat([module.model.eval()(images) for images, _ in _loader()])
    assert torch.allclose(cut, masked, atol=1e-5)


def test_a_fit_that_fails_leaves_the_module_as_it_was(tmp_path: Path) -> None:
    class Failing(Module):
        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            if not self.tasks:
                super().training_step(batch, index)
                raise ArithmeticError
            return super().training_step(batch, index)

    module, pruning = Failing(), SoftPruning(torch.randn(2, 1, 6, 6), strength=1e-2)
    trainer = _trainer(tmp_path, 1, enable_checkpointing=False, callbacks=[pruning])
    with pytest.raises(ArithmeticError):
        trainer.fit(module, _loader())
    assert "training_step" not in vars(module)
    _trainer(tmp_path, 1, enable_checkpointing=False, callbacks=[pruning]).fit(module, _loader())
    assert int(pruning.pruner.clock.step) == 3


def test_manual_optimization_with_several_optimizers(tmp_path: Path) -> None:
    pruning = SoftPruning(torch.randn(2, 1, 6, 6), strength=1e-2)
    _trainer(tmp_path, 1, enable_checkpointing=False, callbacks=[pruning]).fit(Manual(attach=True), _loader())
    assert int(pruning.pruner.clock.step) == 3
    pruning = SoftPruning(torch.randn(2, 1, 6, 6), strength=1e-2)
    with pytest.raises(ConfigError, match=r"Got 2, none attached; call self\.pruner\.attach"):
        _trainer(tmp_path, 1, enable_checkpointing=False, callbacks=[pruning]).fit(Manual(False), _loader())


def test_the_guide_runs_as_it_stands() -> None:
    guide = Path(__file__).parents[2] / "docs" / "integrations.md"
    code, *_ = re.findall(r"^```python\n(.*?)^```", guide.read_text(), flags=re.DOTALL | re.MULTILINE)
    namespace: dict[str, object] = {"__name__": "__main__"}
    exec(compile(code, guide.name, "exec"), namespace)
    assert isinstance(namespace["compact"], nn.Module)


def test_mistakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"call trainer\.fit"):
        SoftPruning(torch.randn(2, 1, 6, 6)).compact()
    pruning = SoftPruning(torch.randn(2, 1, 6, 6), network="backbone")
    with pytest.raises(AttributeError, match="backbone"):
        _trainer(tmp_path, enable_checkpointing=False, callbacks=[pruning]).fit(Module(), _loader())
    monkeypatch.delitem(sys.modules, "softprune.integrations.lightning")
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    with pytest.raises(ImportError, match=r"pip install lightning"):
        import softprune.integrations.lightning  # noqa: F401
