"""What travels to and from the GPU machine, and the list of jobs."""

import os
import pickle
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks_gpu import script
from PIL import Image

from softprune.lab.data.cifar import CIFAR100, load_cifar

data, pack, jobs = script("data"), script("pack"), script("jobs")


def _sheets(folder: Path, name: str, counts: dict[str, int]) -> dict[str, np.ndarray]:
    noise = np.random.default_rng(0)
    images = {split: noise.integers(0, 256, (count, 3, 32, 32), dtype=np.uint8) for split, count in counts.items()}
    for split, values in images.items():
        Image.fromarray(data.sheet_of(values)).save(
            folder / f"{name}-{split}-0.webp", lossless=True, quality=0, method=0
        )
    labels = {split: np.arange(count, dtype=np.uint8) % 10 for split, count in counts.items()}
    np.savez(folder / f"{name}-labels.npz", names=np.array(["cat", "dog"]), **labels)
    return images


@pytest.mark.parametrize(
    ("name", "first", "test", "meta"),
    [
        ("cifar10", "cifar-10-batches-py/data_batch_1", "test_batch", "batches.meta"),
        ("cifar100", "cifar-100-python/train", "test", "meta"),
    ],
)
def test_sheets_become_the_official_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, first: str, test: str, meta: str
) -> None:
    monkeypatch.setattr(data, "COLUMNS", 4)
    images = _sheets(tmp_path, name, {"train": 15, "test": 7})
    folder = data.unpack_cifar(name, tmp_path, tmp_path / "out")
    content = pickle.loads((tmp_path / "out" / first).read_bytes())
    assert content[b"data"].shape == (3 if name == "cifar10" else 15, 3072)
    assert np.array_equal(content[b"data"], images["train"].reshape(15, -1)[: len(content[b"data"])])
    assert np.array_equal(pickle.loads((folder / test).read_bytes())[b"data"], images["test"].reshape(7, -1))
    names = pickle.loads((folder / meta).read_bytes())
    assert next(iter(names.values())) == [b"cat", b"dog"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == [folder.name]


def test_cifar_is_the_same_after_the_journey(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = replace(CIFAR100, train_images=7, test_images=3)
    folder = tmp_path / small.folder
    folder.mkdir()
    noise = np.random.default_rng(0)
    for split, count in (("train", 7), ("test", 3)):
        pixels = noise.integers(0, 256, (count, 3072), dtype=np.uint8)
        content = {b"data": pixels, b"fine_labels": noise.integers(0, 100, count).tolist()}
        (folder / split).write_bytes(pickle.dumps(content))
    (folder / "meta").write_bytes(pickle.dumps({b"fine_label_names": [b"%d" % number for number in range(100)]}))
    sent = load_cifar(small, tmp_path)
    monkeypatch.setattr("softprune.lab.data.load_data", lambda name, root: sent)
    monkeypatch.setattr(data, "COLUMNS", 4)
    data.pack(tmp_path / "gpu-data", {"cifar100": tmp_path}, None, 10**6)
    assert data.unpack(tmp_path / "gpu-data-1", tmp_path / "root") == ["cifar100"]
    received = load_cifar(small, tmp_path / "root" / "data")
    for ours, theirs in ((received.train, sent.train), (received.test, sent.test)):
        assert torch.equal(ours.images, theirs.images)
        assert torch.equal(ours.labels, theirs.labels)
    assert received.class_names == sent.class_names


def test_a_folder_arrives_when_its_last_piece_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "PIECE", 4096)
    source = tmp_path / "tiny" / "train"
    source.mkdir(parents=True)
    content = np.random.default_rng(0).bytes(10_240)  # like a JPEG file, it cannot be compressed
    (source / "a.jpeg").write_bytes(content)
    parts = data.pack(tmp_path / "gpu-data", {"tiny": tmp_path / "tiny"}, None, 8192)
    assert len(parts) > 1
    assert all(sum(file.stat().st_size for file in part.iterdir()) <= 8192 for part in parts)
    arrived, root = tmp_path / "in", tmp_path / "root"
    arrived.mkdir()
    for part in parts:
        assert not (root / "data" / "tiny").exists()
        for file in part.iterdir():
            file.rename(arrived / file.name)
        complete = data.unpack(arrived, root)
    assert complete == ["tiny"]
    assert (root / "data/tiny/train/a.jpeg").read_bytes() == content
    assert data.unpack(arrived, root) == []


def _run(folder: Path, *, finished: bool, method: str = "scp", checkpoint: int = 0) -> None:
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.toml").write_text(f'[method]\nname = "{method}"\n[records]\n')
    for step in (9, 10):
        (folder / "checkpoints" / f"step-{step:010d}.ckpt").write_bytes(bytes(checkpoint))
    if finished:
        (folder / "result.json").write_text("{}")


def test_unfinished_runs_and_dense_networks_come_back(tmp_path: Path) -> None:
    root, out, kept, results = (tmp_path / name for name in ("root", "out", "kept", "results"))
    runs = root / "runs"
    _run(runs / "done-s0", finished=True, checkpoint=100)
    (runs / "done-s0" / "compact.safetensors").write_bytes(b"weights")
    _run(runs / "done-s0" / "dense", finished=True, method="dense", checkpoint=200)
    _run(runs / "plain-dense-s0", finished=True, method="dense", checkpoint=300)
    _run(runs / "half-s0", finished=False, checkpoint=400)
    _run(runs / "large-s0", finished=False, checkpoint=pack.TOTAL)
    _run(runs / "middle-s0", finished=False, checkpoint=pack.FILE + 1)
    left_out = pack.pack(root, out)
    assert [text.partition("/step")[0] for text in left_out] == ["runs/large-s0/checkpoints"]
    assert sorted(file.name for file in out.iterdir()) == ["records.tgz", "weights-1.part", "weights-2.part"]
    assert pack.collect(out, kept, results) == ["done-s0", "plain-dense-s0"]
    assert sorted(path.name for path in (results / "done-s0").iterdir()) == ["config.toml", "result.json"]
    found = sorted(str(path.relative_to(kept)) for path in kept.rglob("*.ckpt"))
    newest = "checkpoints/step-0000000010.ckpt"
    assert found == [f"{run}/{newest}" for run in ("done-s0/dense", "half-s0", "middle-s0", "plain-dense-s0")]


def test_all_files_together_stay_below_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("FILE", 50_000), ("TOTAL", 120_000)):
        monkeypatch.setattr(pack, name, value)
    for number in range(5):
        _run(tmp_path / "runs" / f"half-s{number}", finished=False, checkpoint=30_000)
    assert len(pack.pack(tmp_path, tmp_path / "out")) == 2
    assert [file.stat().st_size <= 50_000 for file in (tmp_path / "out").iterdir()] == [True] * 4


def test_runs_of_one_dense_network_share_it() -> None:
    first, second, other = jobs.jobs(
        [("best-cifar10-resnet56-macs47", 0), ("best-cifar10-resnet56-macs39", 1), ("cifar100-vgg16-scp", 0)]
    )
    dense = f"{first.folder}/dense"
    assert not any("model.weights" in part for part in first.command)
    assert second.needs == ["/tmp/g/data/cifar-10-batches-py", f"{dense}/result.json"]
    assert f"model.weights={dense}" in second.command
    assert f"distill.teacher={dense}" in second.command
    assert "train.dense_baseline=false" in second.command
    assert second.minutes == pytest.approx(first.minutes / 3, rel=0.3)
    assert (first.resumable, other.resumable) == (True, False)
    assert other.resume[3:] == ["resume", other.folder, "--data-dir", "/tmp/g/data"]


def test_a_run_that_was_cut_off_comes_first(tmp_path: Path) -> None:
    _run(tmp_path / "cifar10-resnet56-dense-s1", finished=False)
    (tmp_path / "cifar10-resnet56-dense-s1" / "metrics.jsonl").write_text("{}\n" * 40)
    wanted = [("tinyimagenet-resnet50-fpgm-ft", 0), ("cifar10-resnet56-dense", 1)]
    _run(tmp_path / "tinyimagenet-resnet50-dense-s0", finished=True)
    found = jobs.jobs(wanted, tmp_path)
    assert [job.name for job in found] == ["cifar10-resnet56-dense-s1", "tinyimagenet-resnet50-fpgm-ft-s0"]
    assert found[0].minutes == pytest.approx(0.75 * jobs.jobs(wanted[1:])[0].minutes, abs=0.01)
    # A dense network that did not come back is trained again.
    assert [job.name for job in jobs.jobs(wanted[:1])] == ["tinyimagenet-resnet50-dense-s0", found[1].name]
    assert found[0].needs[-1] == "/tmp/g/runs/cifar10-resnet56-dense-s1/config.toml"
    assert "model.weights=/tmp/g/runs/tinyimagenet-resnet50-dense-s0" in found[1].command
    assert found[1].needs[0] == "/tmp/g/data/tinyimagenet"


def test_waiting_ends_at_once_on_a_machine_without_a_queue(tmp_path: Path) -> None:
    ended = subprocess.run(
        ["bash", "benchmarks/gpu/wait.sh", "60"],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "GPU_ROOT": str(tmp_path), "OUT": str(tmp_path / "out")},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert ended.returncode == 1
    assert "No queue was started on this machine" in ended.stdout
