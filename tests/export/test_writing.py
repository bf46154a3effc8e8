"""A file is written whole or not at all, and a full disk is an error, not the end of the process."""

from pathlib import Path

import pytest
import torch
from limits import file_size_limit
from torch import nn

from softprune.errors import CheckpointError
from softprune.export import to_onnx, to_torch_export


@pytest.mark.parametrize("suffix", ["pt2", "onnx"])
def test_a_full_disk_is_said_and_leaves_the_earlier_file(suffix: str, tmp_path: Path) -> None:
    """The limit on the size of files stands for the disk; PyTorch's own writer ends the process there."""
    if suffix == "onnx":
        for package in ("onnx", "onnxruntime", "onnxscript"):
            pytest.importorskip(package, reason='the "onnx" extra is not installed')
    target = tmp_path / f"small.{suffix}"
    target.write_bytes(b"an earlier file")
    write = to_onnx if suffix == "onnx" else to_torch_export
    refusal = rf"The disk must have room for small\.{suffix}\. Got File too large.*make room, then export again"
    with file_size_limit(50_000), pytest.raises(CheckpointError, match=refusal):
        write(nn.Linear(200, 200), torch.randn(2, 200), target)
    assert target.read_bytes() == b"an earlier file"
    assert [path.name for path in tmp_path.iterdir()] == [target.name]


@pytest.mark.parametrize(("width", "says"), [(9, True), (16, False)])
def test_depthwise_widths_without_a_fast_kernel_are_said(
    width: int, says: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    network = nn.Sequential(nn.Conv2d(3, width, 1), nn.Conv2d(width, width, 3, groups=width))
    to_torch_export(network, torch.randn(2, 3, 8, 8), tmp_path / "network.pt2")
    assert ("1 depthwise convolutions have widths that are no multiples of 8" in caplog.text) is says
