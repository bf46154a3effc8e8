"""Every example runs as it stands, in small: the loops people have, pretrained weights, and a detector's backbone."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
from saved_files import document_of
from torch import Tensor

EXAMPLES = Path(__file__).parents[2] / "examples"


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, smaller_networks: None) -> Path:
    """Examples write where they are run."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    return tmp_path


def test_every_example_is_run() -> None:
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    assert names == {"lightning_digits", "accelerate_digits", "timm_ema", "pretrained", "detection_backbone"}


@pytest.mark.filterwarnings("ignore:The '.*dataloader' does not have many workers")
@pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.")
@pytest.mark.filterwarnings("ignore:The number of training batches")
def test_lightning() -> None:
    pytest.importorskip("lightning.pytorch", reason='the "lightning" extra is not installed')
    before, after = _load("lightning_digits").main(["--epochs", "3", "--images", "192"])
    assert after.macs <= 0.5 * before.macs


def test_accelerate(folder: Path) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    before, after = _load("accelerate_digits").main(["--epochs", "3", "--images", "192", "--cpu"])
    assert after.macs <= before.macs
    assert (folder / "small.safetensors").is_file()


def test_timm_with_ema(folder: Path) -> None:
    pytest.importorskip("timm", reason='the "timm" extra is not installed')
    before, after = _load("timm_ema").main(["--epochs", "2", "--images", "128", "--size", "16"])
    assert after.macs <= 0.5 * before.macs
    assert (folder / "small.safetensors").is_file()


def test_pretrained(folder: Path) -> None:
    before, after = _load("pretrained").main(["--epochs", "4", "--keep", "0.6"])
    assert before > 0.8
    assert after > 0.8
    plan = document_of(folder / "small.safetensors")["plans"][0]["plan"]
    assert plan["macs"] <= 0.6 * plan["dense_macs"]
    again = _load("pretrained").main(["--epochs", "1", "--weights", "dense.safetensors"])
    assert again[0] == before


def test_detection_backbone(folder: Path) -> None:
    pytest.importorskip("torchvision", reason='the "vision" extra is not installed')
    library = _python_nms()
    before, after = _load("detection_backbone").main(["--steps", "2", "--size", "32"])
    assert after.macs <= 0.7 * before.macs
    assert (folder / "backbone.safetensors").is_file()
    del library


def _python_nms() -> torch.library.Library | None:
    """Beside a torch that torchvision's kernels do not fit (see benchmarks/vision.py), its one operator in Python."""
    if torch._C._dispatch_has_kernel_for_dispatch_key("torchvision::nms", "CPU"):
        return None
    library = torch.library.Library("torchvision", "IMPL", "CPU")

    def nms(boxes: Tensor, scores: Tensor, threshold: float) -> Tensor:
        kept: list[int] = []
        areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
        for index in scores.argsort(descending=True).tolist():
            if kept:
                others = boxes[kept]
                low, high = (
                    torch.maximum(boxes[index, :2], others[:, :2]),
                    torch.minimum(boxes[index, 2:], others[:, 2:]),
                )
                common = (high - low).clamp(min=0).prod(1)
                if (common / (areas[index] + areas[kept] - common)).max() > threshold:
                    continue
            kept.append(index)
        return torch.tensor(kept, dtype=torch.int64)

    library.impl("nms", nms)
    return library
