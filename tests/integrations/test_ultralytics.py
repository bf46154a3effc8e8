"""YOLO pruned inside ultralytics' own training: best.pt is compact, and ultralytics uses it as any other."""

import re
from collections.abc import Iterator
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import softprune as sp
from softprune.errors import ConfigError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]
pytest.importorskip("ultralytics", reason="ultralytics is not installed")

from ultralytics import YOLO  # noqa: E402
from ultralytics.utils.nms import TorchNMS  # noqa: E402

from softprune.integrations.ultralytics import PruningTrainer, load_yolo, prune_yolo  # noqa: E402

NETWORK = """
nc: 2
scales: {n: [0.33, 0.25, 1024]}
backbone:
  - [-1, 1, Conv, [32, 3, 2]]
  - [-1, 1, Conv, [64, 3, 2]]
  - [-1, 3, C2f, [64, True]]
  - [-1, 1, Conv, [128, 3, 2]]
  - [-1, 3, C3k2, [128, True]]
head:
  - [-1, 1, nn.Upsample, [None, 2, "nearest"]]
  - [[-1, 2], 1, Concat, [1]]
  - [-1, 1, C2f, [64]]
  - [[7, 4], 1, Detect, [nc]]
"""
TARGET = {"macs": 0.5}
EPOCHS = 4
IMAGE = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a network of a few layers and sixteen images that have a light square or a dark one."""
    import torchvision

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torchvision.ops, "nms", TorchNMS.nms)  # torchvision's own may not fit the installed torch
    rng = np.random.default_rng(0)
    for kind in ("images", "labels"):
        (tmp_path / "data" / kind).mkdir(parents=True)
    for number in range(16):
        pixels = rng.integers(80, 160, (64, 64, 3), dtype=np.uint8)
        x, y = rng.integers(0, 40, 2)
        pixels[y : y + 24, x : x + 24] = 255 * (number % 2)
        Image.fromarray(pixels).save(tmp_path / f"data/images/{number}.png")
        label = f"{number % 2} {(x + 12) / 64} {(y + 12) / 64} {24 / 64} {24 / 64}"
        (tmp_path / f"data/labels/{number}.txt").write_text(label)
    Path("data.yaml").write_text(f"path: {tmp_path}/data\ntrain: images\nval: images\nnames: [dark, light]\n")
    Path("tinyn.yaml").write_text(NETWORK)
    return tmp_path


def arguments(**more: Any) -> dict[str, Any]:
    few = {"data": "data.yaml", "epochs": EPOCHS, "imgsz": 64, "batch": 4, "nbs": 8, "warmup_epochs": 1.0}
    return few | {"project": str(Path("runs").resolve()), "name": "a", "plots": False, "exist_ok": True} | more


def macs(network: torch.nn.Module) -> int:
    return sp.cost(network.float().eval(), IMAGE).macs


def boxes(network: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return network.float().eval()(IMAGE)[0]


def stop_after(yolo: YOLO, epoch: int) -> None:
    """Let a training end as a kill would end it."""

    def stop(trainer: Any) -> None:
        if trainer.epoch == epoch:
            raise KeyboardInterrupt

    yolo.add_callback("on_model_save", stop)


def test_a_pruned_detector_does_all_that_a_dense_one_does() -> None:
    yolo = prune_yolo("tinyn.yaml", target=TARGET, **arguments())
    dense = YOLO("tinyn.yaml").model
    assert 0.3 * macs(dense) < macs(yolo.model) <= 0.5 * macs(dense)
    best = Path("runs/a/weights/best.pt")
    again = YOLO(best)
    assert torch.equal(boxes(again.model), boxes(yolo.model))
    assert again.model.names == {0: "dark", 1: "light"}
    again.val(data="data.yaml", imgsz=64, plots=False)
    assert len(again.predict(Image.new("RGB", (64, 64)), imgsz=64)) == 1

    sp.save(yolo.model, "small.safetensors")
    loaded = load_yolo("small.safetensors", "tinyn.yaml", {0: "dark", 1: "light"})
    assert torch.equal(boxes(loaded.model), boxes(yolo.model))
    loaded.val(data="data.yaml", imgsz=64, plots=False)

    onnxruntime = pytest.importorskip("onnxruntime")
    file = YOLO(best).export(format="onnx", imgsz=64, simplify=False)
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"images": IMAGE.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), boxes(yolo.model), rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("epoch", [0, 2])
def test_a_stopped_training_resumes_before_and_after_the_cut(epoch: int) -> None:
    trainer = partial(PruningTrainer, target=TARGET)
    yolo = YOLO("tinyn.yaml")
    stop_after(yolo, epoch)
    with pytest.raises(KeyboardInterrupt):
        yolo.train(trainer=trainer, **arguments())
    last, best, dense = Path("runs/a/weights/last.pt"), Path("runs/a/weights/best.pt"), macs(YOLO("tinyn.yaml").model)
    assert best.exists() == (epoch == 2)
    assert (macs(YOLO(last).model) < dense) == (epoch == 2)
    again, begun = YOLO(last), []
    again.add_callback("on_train_start", lambda each: begun.append(each.pruner and int(each.pruner.clock.step)))
    again.train(trainer=trainer, resume=True)
    assert begun == [None] if epoch == 2 else begun[0] > 0, "the clock of the masks continues"
    assert macs(again.model) <= 0.5 * dense
    assert len(Path("runs/a/results.csv").read_text().splitlines()) == 1 + EPOCHS


def test_a_compact_network_trains_further() -> None:
    yolo = prune_yolo("tinyn.yaml", target=TARGET, **arguments(epochs=2))
    before = macs(yolo.model)
    yolo.train(trainer=PruningTrainer, **arguments(epochs=1, name="b"))
    assert macs(yolo.model) == before
    Path("other.yaml").write_text(Path("data.yaml").read_text().replace("[dark, light]", "[dark, light, none]"))
    with pytest.raises(ConfigError, match="classes"):
        yolo.train(trainer=PruningTrainer, **arguments(data="other.yaml", epochs=1, name="c"))


@pytest.mark.parametrize("more", [{"time": 0.1}, {"epochs": 1}])
def test_what_pruning_cannot_do_is_refused(more: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        prune_yolo("tinyn.yaml", target=TARGET, **arguments(**more))


@pytest.mark.parametrize(("name", "dead"), [("yolov8n", "model.12."), ("yolo11n", "model.13.")])
def test_the_published_networks_are_cut_fused_saved_and_exported(name: str, dead: str) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    yolo = YOLO(f"{name}.yaml")
    pruner = sp.SoftPruner(yolo.model.float().train(), torch.rand(2, 3, 64, 64))
    with torch.no_grad():
        for site, norm in pruner.norms.items():
            norm.weight.fill_(0.3)
            norm.bias.copy_(
                torch.where(torch.rand(len(norm.bias)) < (1.0 if site.startswith(dead) else 0.5), -8.0, 0.5)
            )
    dense = macs(YOLO(f"{name}.yaml").model)
    yolo.model = pruner.compact()
    assert macs(yolo.model) < 0.5 * dense
    expected = boxes(yolo.model)
    fused = deepcopy(yolo.model).fuse(verbose=False)
    assert not any(isinstance(module, torch.nn.BatchNorm2d) for module in fused.modules())
    torch.testing.assert_close(boxes(fused), expected, rtol=1e-4, atol=1e-2)
    yolo.save("pruned.pt")  # in half precision
    expected = boxes(YOLO("pruned.pt").model)
    assert len(YOLO("pruned.pt").predict(IMAGE, imgsz=64)) == 1
    session = onnxruntime.InferenceSession(YOLO("pruned.pt").export(format="onnx", imgsz=64, simplify=False))
    (found,) = session.run(None, {"images": IMAGE.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), expected, rtol=1e-3, atol=1e-2)


def test_the_code_of_the_guide_runs() -> None:
    pytest.importorskip("onnxruntime")
    text = (Path(__file__).parents[2] / "docs/yolo.md").read_text()
    short_ones = {"320)": "8)", "100)):": "4)):", 'epochs=20, name="dense': 'epochs=1, name="dense'}
    short_ones |= {'epochs=20, name="small': 'epochs=2, name="small', "3, 640, 640": "3, 64, 64"}
    for long, short in short_ones.items():
        assert text.count(long) == 1
        text = text.replace(long, short)
    blocks = re.findall(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(compile("\n".join(blocks), "yolo.md", "exec"), namespace)
    assert Path("small.safetensors").exists()
