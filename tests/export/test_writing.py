"""A file is written whole or not at all, and a full disk is an error, not the end of the process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from softprune.errors import CheckpointError
from softprune.export import to_torch_export

_FULL = """
import resource, sys, torch
from softprune import export
from softprune.errors import CheckpointError

resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
write = export.to_onnx if sys.argv[1].endswith("onnx") else export.to_torch_export
try:
    write(torch.nn.Linear(200, 200), torch.randn(2, 200), sys.argv[1])
except CheckpointError as error:
    print("refused:", error)
"""


@pytest.mark.parametrize("suffix", ["pt2", "onnx"])
def test_a_full_disk_is_said_and_leaves_the_earlier_file(suffix: str, tmp_path: Path) -> None:
    """The limit on the size of files stands for the disk; PyTorch's own writer ends the process there."""
    if suffix == "onnx":
        for package in ("onnx", "onnxruntime", "onnxscript"):
            pytest.importorskip(package, reason='the "onnx" extra is not installed')
    target = tmp_path / f"small.{suffix}"
    target.write_bytes(b"an earlier file")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    # Without bytecode, which would be cut off at the limit, too.
    command = [sys.executable, "-B", "-c", _FULL, str(target)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert f"refused: The disk must have room for small.{suffix}. Got File too large" in done.stdout
    assert "make room, then export again" in done.stdout
    assert target.read_bytes() == b"an earlier file"
    assert [path.name for path in tmp_path.iterdir()] == [target.name]


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"must be writable\. Got .*then export again"):
        to_torch_export(nn.Linear(4, 4), torch.randn(2, 4), tmp_path / "file" / "small.pt2")
