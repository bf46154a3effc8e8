"""The benchmark's script, tiny and on the CPU."""

import importlib
import io
import json
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("PIL", reason='the "vision" extra is not installed')
SCRIPTS = Path(__file__).parents[2] / "benchmarks"
TINY = "--make 12 --model resnet20 --crop 16 --batch 4 --seconds 0.1 --block 1 --workers 1 --processes 2 --device cpu"


@pytest.fixture
def gpu_waiting(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    module = importlib.import_module("gpu_waiting")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield module
    torch.set_num_threads(threads)


@pytest.mark.slow
def test_both_forms_are_compared_with_resident_batches(gpu_waiting, tmp_path, capsys):
    out = tmp_path / "record.json"
    record = gpu_waiting.main([*TINY.split(), "--mode", "eager", "--out", str(out)])
    assert record == json.loads(out.read_text())
    resident, folder, shards, again = [row for row in record["rows"] if row["part"] == "waiting"]
    assert [row["form"] for row in (folder, shards)] == ["folder", "webdataset"]
    for row in (folder, shards):
        share = 100 * (1 - resident["ms_per_step"] / row["ms_per_step"])
        assert row["waiting_percent"] == pytest.approx(share, abs=0.01)
        assert row["loader_alone_images_per_second"] > 0
    assert resident["images_per_second"] > 0
    assert again["steps"] >= 3
    assert not [row for row in record["rows"] if "error" in row]


def test_an_error_is_a_row_and_the_other_parts_follow(gpu_waiting, tmp_path, capsys):
    arguments = [*TINY.split(), "--model", "nothing", "--mode", "eager", "--out", str(tmp_path / "record.json")]
    rows = gpu_waiting.main(arguments)["rows"]
    assert [row["part"] for row in rows] == ["files", "waiting", "end"]
    assert "nothing" in rows[1]["error"]


def test_the_time_limit_ends_the_record(gpu_waiting, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(gpu_waiting, "measure", lambda options, report: time.sleep(20))
    arguments = [*TINY.split(), "--time-limit", "0.01", "--mode", "eager", "--out", str(tmp_path / "record.json")]
    assert "time limit of 0.01 s" in gpu_waiting.main(arguments)["rows"][-1]["error"]


def test_decoding_in_batches_crops_every_image(gpu_waiting, monkeypatch):
    from vision import import_torchvision

    from softprune.lab.data.images import decode_image, image_tensor

    torchvision = import_torchvision()
    calls = []

    def decode_jpeg(batch, mode, device):
        calls.append(len(batch))
        return [image_tensor(decode_image(image.numpy().tobytes())) for image in batch]

    monkeypatch.setattr(torchvision.io, "decode_jpeg", decode_jpeg)
    path = io.BytesIO()
    from PIL import Image

    Image.new("RGB", (20, 10)).save(path, "JPEG")
    options = gpu_waiting.parse([*TINY.split(), "--decode-seconds", "0.0001", "--out", "x"])
    row = importlib.import_module("decoders").on_gpu([path.getvalue()] * 6, 8, options)
    assert row["images_per_second"] > 0
    assert calls[:3] == [4, 4, 2]
